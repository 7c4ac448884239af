"""This module tells a worker that is slow to answer probes from one that answers: a process that
was stopped, or a machine that swaps, is in the log long before it is taken out.

A slow worker keeps its turns: engines that compute answer late. It counts as slow from the first
probe that is unanswered for a while, and as quick after several probes answered at once, so that
one that is at the edge is told of once.

    QUICK ─ unanswered for slow_s ─> SLOW ─ QUICK_IN_A_ROW probes answered sooner ─> QUICK
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ownerserve.kv.ids import WorkerId

QUICK_IN_A_ROW = 3
_LATE_SHARE = 0.25
"""A timer that fires later than by this share says that the gateway itself was held up."""


class WorkerSlow(msgspec.Struct, frozen=True):
    """A worker has not answered a probe for `waited_s` so far."""

    worker: WorkerId
    waited_s: float


class WorkerQuick(msgspec.Struct, frozen=True):
    """A worker that was slow answers at once again."""

    worker: WorkerId


Pace = WorkerSlow | WorkerQuick


class ProbeWatch:
    """A probe watch looks how long one worker's probes are unanswered, and tells what changes."""

    def __init__(self, worker: WorkerId, slow_s: float, tell: Callable[[Pace], None]) -> None:
        self.is_slow = False
        self._worker = worker
        self._slow_s = slow_s
        self._tell = tell
        self._quick = 0
        self._timer: asyncio.TimerHandle | None = None

    def asked(self) -> None:
        """Begin to wait for the answer to a probe."""
        self._wait(self._slow_s)

    def answered(self) -> None:
        """Note that the probe is answered, well or not."""
        if self._timer is None:
            return  # it was slow
        self.given_up()
        self._quick += 1
        if self.is_slow and self._quick >= QUICK_IN_A_ROW:
            self.is_slow = False
            self._tell(WorkerQuick(self._worker))

    def given_up(self) -> None:
        """Wait no more for the present probe; that says nothing of the worker."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, waited_s: float) -> None:
        self.given_up()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._slow_s
        self._timer = loop.call_at(due_s, self._look, due_s, waited_s)

    def _look(self, due_s: float, waited_s: float) -> None:
        """Tell that the worker is slow, unless nobody here could have read its answer."""
        if asyncio.get_running_loop().time() - due_s > self._slow_s * _LATE_SHARE:
            self._wait(waited_s + self._slow_s)
            return
        self._timer = None
        self._quick = 0
        if not self.is_slow:
            self.is_slow = True
            self._tell(WorkerSlow(self._worker, waited_s))
