"""A worker as the router counts it: its own dispatches, and the worker's dated word.

Owns the load ledger. Load is added when a request is dispatched, whatever path led there, and
taken off in two parts: its prefill at the first byte, the rest at its end.

What stands before a new request at a worker is not only this router's doing. Workers stamp their
load on their answers; a stamp replaces what was known, and the router adds what it dispatched
since. Which dispatches a stamp has seen follows from its time `as_of`, put on the router's clock:
the smallest (heard - as_of) of this life is the clocks' difference plus the fastest way back.

    dispatch ──> worker ── stamp (as_of) ──> heard        at_s > seen_until_s: not in the stamp
          at_s                seen_until_s = as_of + difference - TRANSIT_S
"""

from __future__ import annotations

from collections import deque

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import WorkerStatus
from ownerserve.router.profile import UNKNOWN, Profile

TRANSIT_S = 0.002
"""How long a request may be on its way to the worker beyond the fastest answer's way back."""

DRIFT = 1e-4
"""How fast two clocks may part; the smallest difference is let grow by it."""

RECENT_MAX = 256
"""Dispatches a worker that may be younger than its next stamp; all others count as seen."""


class Load(msgspec.Struct, gc=False):
    """What one dispatch counts for at `worker`; all of it is 0 once it was taken off."""

    worker: Worker
    at_s: float
    prefill_tokens: int
    held_tokens: int
    sequences: int = 1


class Watch:
    """What an order is told by the workers that stand in it: who changed, how many run in all."""

    __slots__ = ("changed", "counted")

    def __init__(self) -> None:
        self.changed: set[Worker] = set()
        self.counted = 0
        """Sequences at all of them, by each one's last estimate."""

    @property
    def sequences(self) -> int:
        """Sequences at all of them now."""
        for worker in self.changed:
            worker._estimate()
        return self.counted


class Worker:
    """One routing unit: a data-parallel rank of an engine process, in its present life.

    `requests`, `pending_prefill_tokens`, `held_tokens` are this router's own dispatches.
    `pending_tokens`, `queue_ms`, `batch`, `kv_bytes_free`, `occupancy` are the present estimate of
    everybody's. A change (`refresh`) marks them old, who asks next has them made anew: a turn
    changes its worker's load six times, and is decided once.
    """

    __slots__ = (
        "_batch",
        "_clock_s",
        "_delta_batch",
        "_delta_held",
        "_delta_pending",
        "_is_old",
        "_kv_bytes_free",
        "_occupancy",
        "_pending_tokens",
        "_queue_ms",
        "_recent",
        "_stamp",
        "bound_sessions",
        "dp_rank",
        "held_tokens",
        "id",
        "incarnation",
        "life",
        "order",
        "pending_prefill_tokens",
        "profile",
        "requests",
        "speed",
        "up",
        "watchers",
    )

    def __init__(self, worker: WorkerId, order: int, *, dp_rank: int = 0) -> None:
        self.id = worker
        self.dp_rank = dp_rank
        self.order = order
        self.up = False
        self.incarnation: Incarnation | None = None
        self.life = 0
        """Grows with each incarnation; copies in volatile tiers are good for one life."""
        self.profile: Profile = UNKNOWN
        self.speed = UNKNOWN.speed
        self.watchers: tuple[Watch, ...] = ()
        """Who must know that its load has changed: the orders it stands in (candidates.py)."""
        self.bound_sessions = 0
        self.requests = self.pending_prefill_tokens = self.held_tokens = 0
        self._is_old = False
        self._pending_tokens = self._batch = 0
        self._queue_ms = 0.0
        self._kv_bytes_free = float("inf")
        self._occupancy = 0.0
        self._recent: deque[Load] = deque(maxlen=RECENT_MAX)
        self._stamp: WorkerStatus | None = None
        self._clock_s = float("inf")
        self._delta_pending = self._delta_batch = self._delta_held = 0

    def become(self, profile: Profile) -> None:
        """What it says it is."""
        self.profile, self.speed = profile, profile.speed
        self.refresh()

    def begin_life(self, incarnation: Incarnation | None) -> None:
        """A new process: what the old one held in volatile tiers is gone at once."""
        self.incarnation = incarnation
        self.life += 1
        self.bound_sessions = 0
        self._forget_stamps()
        self.refresh()

    def stamp(self, status: WorkerStatus, now_s: float) -> None:
        """Take the worker's word, and add what was dispatched since it was given."""
        known = self._stamp
        if known is not None and status.as_of <= known.as_of:
            return  # a later one was heard before
        if known is not None:
            self._clock_s += DRIFT * (status.as_of - known.as_of)
        self._stamp = status
        self._clock_s = min(self._clock_s, now_s - status.as_of)
        seen_until_s = status.as_of + self._clock_s - TRANSIT_S
        pending = batch = held = 0
        for load in reversed(self._recent):
            if load.at_s <= seen_until_s:
                break
            pending += load.prefill_tokens
            held += load.held_tokens
            batch += load.sequences
        self._delta_pending, self._delta_batch, self._delta_held = pending, batch, held
        self.refresh()

    def add(self, load: Load) -> None:
        """A dispatch of our own."""
        self.requests += 1
        self.pending_prefill_tokens += load.prefill_tokens
        self.held_tokens += load.held_tokens
        self._delta_pending += load.prefill_tokens
        self._delta_held += load.held_tokens
        self._delta_batch += load.sequences
        self._recent.append(load)
        self.refresh()

    def take_prefill(self, load: Load) -> None:
        """Its prefill is over."""
        self.pending_prefill_tokens -= load.prefill_tokens
        self._delta_pending -= load.prefill_tokens
        load.prefill_tokens = 0
        self.refresh()

    def take(self, load: Load) -> None:
        """It has ended."""
        self.requests -= 1
        self.pending_prefill_tokens -= load.prefill_tokens
        self.held_tokens -= load.held_tokens
        self._delta_pending -= load.prefill_tokens
        self._delta_held -= load.held_tokens
        self._delta_batch -= load.sequences
        load.prefill_tokens = load.held_tokens = load.sequences = 0
        if self.requests < 0 or self.pending_prefill_tokens < 0 or self.held_tokens < 0:
            raise InvariantViolated(f"invariant 5: load of {self.id} went below zero")
        self.refresh()

    def refresh(self) -> None:
        """Its load has changed: say so to the orders that it stands in."""
        if not self._is_old:
            self._is_old = True
            for watch in self.watchers:
                watch.changed.add(self)

    def _estimate(self) -> None:
        """Make the estimates anew, if they are old."""
        if not self._is_old:
            return
        self._is_old = False
        stamp = self._stamp
        pending, batch = self._delta_pending, self._delta_batch
        if stamp is not None:
            pending += stamp.pending_prefill_tokens
            batch += stamp.running_sequences + stamp.waiting_sequences
        self._pending_tokens = pending = pending if pending > 0 else 0
        batch = batch if batch > 0 else 0
        more, self._batch = batch - self._batch, batch
        prefill = self.speed.prefill
        token_ms = prefill.b_ms
        if self.requests:
            token_ms += prefill.c_ms * (self.held_tokens / self.requests)
        self._queue_ms = pending * token_ms
        total = free = self.profile.kv_bytes_total
        if stamp is not None:
            total, free = stamp.kv_bytes_total, stamp.kv_bytes_free
        if total:
            left = free - self._delta_held * self.speed.kv_bytes_per_token
            self._kv_bytes_free = left = 0.0 if left < 0.0 else left if left < total else total
            self._occupancy = 1.0 - left / total
        for watch in self.watchers:
            watch.counted += more

    @property
    def pending_tokens(self) -> int:
        """Prefill that stands before a new request."""
        if self._is_old:
            self._estimate()
        return self._pending_tokens

    @property
    def queue_ms(self) -> float:
        """How long that takes."""
        if self._is_old:
            self._estimate()
        return self._queue_ms

    @property
    def batch(self) -> int:
        """Sequences that run or wait there."""
        if self._is_old:
            self._estimate()
        return self._batch

    @property
    def kv_bytes_free(self) -> float:
        """Free or evictable device memory for state; infinite where nothing is known."""
        if self._is_old:
            self._estimate()
        return self._kv_bytes_free

    @property
    def occupancy(self) -> float:
        """Share of the device memory for state that is in use; 0 where nothing is known."""
        if self._is_old:
            self._estimate()
        return self._occupancy

    def _forget_stamps(self) -> None:
        self._stamp = None
        self._clock_s = float("inf")
        self._delta_pending = self.pending_prefill_tokens
        self._delta_batch, self._delta_held = self.requests, self.held_tokens
