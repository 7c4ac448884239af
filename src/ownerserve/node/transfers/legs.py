"""Legs of gateways have a node compute a prompt for who asks for it by the leg's number
(prefills.py): from any thread, where those that peers order come by RPC.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import cast

from ownerserve.kv.wire.rpc import Nonce, Prefill, RpcAnswer
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.prefills import Prefills, PromptOver


class GatewayLegs:
    """`GatewayLegs` are begun and ended on the engine's thread, by calls from any other."""

    def __init__(self, prefills: Prefills, on_engine: Callable[[], OnEngine]) -> None:
        self._prefills = prefills
        self._on_engine = on_engine

    def begin(self, asked: Prefill, over: PromptOver) -> Future[RpcAnswer]:
        """Begin to compute the leg's prompt; `over` hears on the engine's thread how much of it
        there is, once nothing is added."""
        begun = self._on_engine()(partial(self._prefills.begin_leg, asked, over))
        return cast("Future[RpcAnswer]", begun)

    def end(self, leg: Nonce) -> None:
        """Give up what the leg has asked for."""
        with suppress(RuntimeError):  # an engine that has ended computes nothing
            self._on_engine()(partial(self._prefills.end_leg, leg))
