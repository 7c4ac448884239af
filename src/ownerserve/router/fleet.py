"""The workers as the router counts them: what was sent to each and has not come back.

Owns the load ledger. Load is added when a request is dispatched, whatever path led there, and
taken off in two parts: its prefill at the first byte, the rest at its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId, WorkerId


class Worker:
    """One engine process. `up` is the state's word; counts are this router's own dispatches."""

    __slots__ = (
        "held_tokens",
        "id",
        "order",
        "pending_prefill_tokens",
        "requests",
        "sessions",
        "up",
    )

    def __init__(self, worker: WorkerId, order: int) -> None:
        self.id = worker
        self.order = order
        self.up = False
        self.pending_prefill_tokens = 0
        self.held_tokens = 0
        self.requests = 0
        self.sessions: set[SessionId] = set()

    @property
    def bound_sessions(self) -> int:
        return len(self.sessions)


class Load(msgspec.Struct, gc=False):
    """What one dispatch counts for at its worker. `prefill_tokens` becomes 0 at the first byte."""

    prefill_tokens: int
    held_tokens: int


class Fleet:
    """All workers ever seen, in a stable order, and the load on each."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self._up: tuple[Worker, ...] = ()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, worker: WorkerId) -> Worker:
        return self._workers[worker]

    @property
    def up(self) -> tuple[Worker, ...]:
        """Workers that may be chosen, in the order in which they first came."""
        return self._up

    def raise_up(self, worker: WorkerId) -> None:
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = Worker(worker, len(self._workers))
        known.up = True
        self._recount()

    def take_down(self, worker: WorkerId) -> Worker | None:
        """The worker, when it was up; None when there is nothing to do."""
        known = self._workers.get(worker)
        if known is None or not known.up:
            return None
        known.up = False
        self._recount()
        return known

    def _recount(self) -> None:
        self._up = tuple(worker for worker in self._workers.values() if worker.up)

    @staticmethod
    def count(worker: Worker, load: Load) -> None:
        worker.requests += 1
        worker.pending_prefill_tokens += load.prefill_tokens
        worker.held_tokens += load.held_tokens

    @staticmethod
    def release_prefill(worker: Worker, load: Load) -> None:
        worker.pending_prefill_tokens -= load.prefill_tokens
        load.prefill_tokens = 0

    @staticmethod
    def release(worker: Worker, load: Load) -> None:
        worker.requests -= 1
        worker.pending_prefill_tokens -= load.prefill_tokens
        worker.held_tokens -= load.held_tokens
        if worker.requests < 0 or worker.pending_prefill_tokens < 0 or worker.held_tokens < 0:
            raise InvariantViolated(f"invariant 5: load of {worker.id} went below zero")
