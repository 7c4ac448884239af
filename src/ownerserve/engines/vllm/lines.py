"""The worker's line on vLLM's answers: ASGI middleware that the endpoint plug-in adds.

    a turn comes, of parent, group, epoch, version ── AskLine ──> engine core
    its answer's head ── AskLine ──> engine core ── LineIs ──> x-ownerserve-answer

vLLM's request has no place for these. They are told when the turn comes, and not again with its
answer: the session may have ended by then.

Owns the one connection to the engine core that they go by. Answers to gateways alone, who send a
turn line; a core that is silent costs the line and ASK_S of one answer a second, never an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from ownerserve.engines.vllm.scheduler_side.node_rpc import ADDRESS_FILE
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire import answer_line, turn_line
from ownerserve.kv.wire.rpc import AskLine, LineIs, Said
from ownerserve.kv.wire.turn_line import TurnLine
from ownerserve.node.rpc.server import RpcClient

ASK_S = 0.25
PAUSE_S = 1.0
"""After a silence, before the engine core is asked again."""

_TURN, _ANSWER = turn_line.HEADER.encode(), answer_line.HEADER.encode()

Send = Callable[[Any], Awaitable[None]]


class CoreLine:
    """The engine core whose store this is, asked by a thread over one connection."""

    def __init__(self, store: Path) -> None:
        self._address = store / ADDRESS_FILE
        self._thread = ThreadPoolExecutor(1, "ownerserve-line")
        self._client: RpcClient | None = None
        self._again_s = 0.0

    async def ask(self, question: AskLine) -> Said | None:
        """What it says; None: it is silent."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, question)

    def tell(self, question: AskLine) -> None:
        """Ask for what the question says, not for its answer."""
        self._thread.submit(self._ask, question)

    def _ask(self, question: AskLine) -> Said | None:
        if time.monotonic() < self._again_s:
            return None
        try:
            if self._client is None:
                self._client = RpcClient(self._address.read_text().strip(), timeout_s=ASK_S)
            return self._client.ask(question)
        except (OSError, zmq.ZMQError, InvalidInput):  # silent, gone: the address is read anew
            if self._client is not None:
                self._client.close()
            self._client, self._again_s = None, time.monotonic() + PAUSE_S
            return None


class AnswerLines:
    """Puts the line on answers to turns that a gateway sent. `core` says whom to ask; None: nobody
    yet, or ever."""

    def __init__(self, app: Any, *, core: Callable[[], CoreLine | None]) -> None:
        self._app = app
        self._core = core

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        core = self._core()
        line = _turn_of(scope) if core is not None else None
        if core is None or line is None:
            await self._app(scope, receive, send)
            return
        if line.name is not None and (line.parent or line.epoch or line.group or line.version):
            group, version = line.group or "", line.version or 0
            core.tell(AskLine(line.name, line.parent, group, line.epoch, version))

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                said = await core.ask(AskLine(line.name))
                if isinstance(said, LineIs):
                    told = (_ANSWER, answer_line.encode(said.line))
                    message = {**message, "headers": [*message.get("headers", ()), told]}
            await send(message)

        await self._app(scope, receive, sent)


def _turn_of(scope: Any) -> TurnLine | None:
    """What a gateway says of the turn; None: no gateway sent it, or not in a form that is read."""
    if scope["type"] != "http":
        return None
    value = next((value for name, value in scope["headers"] if name == _TURN), None)
    try:
        return None if value is None else turn_line.decode(value.decode("latin-1"))
    except InvalidInput:
        return None
