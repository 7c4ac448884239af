"""A worker that is busy, and prices by which what is elsewhere is far: what sessions and forks are
moved and copied for.
"""

from __future__ import annotations

import itertools
import threading

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.node.runtime import node_runtime
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from tests.support.hf.engine_rig import text
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker


def priced(*, peer_ms: float) -> Defaults:
    """A queue of 600 tokens takes 3 s, a context of 300 tokens 46 s to compute, and this long to
    bring."""
    return msgspec.structs.replace(
        node_runtime.UNMEASURED,
        prefill=Coefficients(0.0, 5.0, 1.0),
        tiers={**node_runtime.UNMEASURED.tiers, Tier.PEER: Medium(peer_ms, 1e6)},
    )


FAR, NEAR = priced(peer_ms=20_000.0), priced(peer_ms=100.0)
"""What must come from afar is too late for a turn that waits 3 s; what is near is not."""


class Busy:
    """A worker that has prompts to compute all the time, of which no gateway knows."""

    def __init__(self, worker: ServedWorker, *, at_once: int = 3, tokens: int = 300) -> None:
        self._worker = worker
        self._tokens = tokens
        self._numbers = itertools.count(1000)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            prompt = text(self._tokens, seed=next(self._numbers))
            self._worker.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def queue_ms(gateway: ServedGateway, worker: ServedWorker) -> float:
    return gateway.read(
        lambda: sum(one.queue_ms for one in gateway.gateway.state.fleet if one.id == worker.name)
    )
