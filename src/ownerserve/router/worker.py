"""This module holds a worker as the router knows it: its profile, and the load that it is counted
to carry.

A worker's profile is what it is by its own word: a worker that says nothing serves every model, at
the speed of DEFAULT_SPEED, and can do what any engine can.

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
from collections.abc import Mapping
from enum import StrEnum
from typing import NewType

import msgspec

from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.status import RefillShare, WorkerLoad, refill_share_at
from ownerserve.plan.cost.prices import Coefficients, Medium

FIRST_PROMPT_TOKENS = 8192
LOADED_TIERS = (Tier.HOST, Tier.DISK, Tier.PEER, Tier.REMOTE)


class WorkerRole(StrEnum):
    """A worker's role says which part of a turn it takes, in the words of kv.wire.status.ROLES."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Runs turns to their end; computes a short addition to what it holds itself."""
    HYBRID = "hybrid"


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A speed says what things take on a worker: measured by its node (plan.cost), else from a data
    sheet.

    A decode step takes `step_ms` + `step_ms_per_sequence` x batch. `media`: loading from its own
    host memory and disk, from a peer's memory over the network, from the shared store.
    `replay_tokens`: what is computed again after state came from anywhere but the device, beside
    the tail (0 where point state is kept; kv.geometry). A sequence takes `kv_bytes_per_sequence`
    of device memory, and `kv_bytes_per_token` more for each of its tokens.
    """

    prefill: Coefficients
    step_ms: float
    step_ms_per_sequence: float
    media: dict[Tier, Medium]
    kv_bytes_per_token: float
    kv_bytes_per_sequence: float = 0.0
    replay_tokens: int = 0
    first_prompt_ms: float = 0.0
    """Made here: the prefill of FIRST_PROMPT_TOKENS; it orders workers of unlike speed."""

    def __post_init__(self) -> None:
        missing = [tier.value for tier in LOADED_TIERS if tier not in self.media]
        if missing:
            raise InvalidInput("speed.media", f"lacks {', '.join(missing)}", "price every tier")
        msgspec.structs.force_setattr(
            self, "first_prompt_ms", self.prefill.ms(FIRST_PROMPT_TOKENS, 0)
        )

    def sequence_bytes(self, tokens: int) -> float:
        """Return the device memory, in bytes, that a sequence of `tokens` takes; 0 for none."""
        if tokens <= 0:
            return 0.0
        return self.kv_bytes_per_sequence + tokens * self.kv_bytes_per_token


DEFAULT_SPEED = Speed(
    prefill=Coefficients(6.0, 0.0122, 1.45e-6),
    step_ms=6.0,
    step_ms_per_sequence=1.0,
    media={
        Tier.HOST: Medium(0.05, 51.2e6),
        Tier.DISK: Medium(0.3, 3.0e6),
        Tier.PEER: Medium(0.5, 10.0e6),
        Tier.REMOTE: Medium(8.0, 1.0e6),
    },
    kv_bytes_per_token=98304.0,
)
"""Qwen3-30B-A3B on one H200 by data sheet (plan.cost.roofline), 50k tokens a sequence."""

EVERY_ENGINE = frozenset({
    PlacementAction.COLOCATED_PREFILL,
    PlacementAction.DECODE_CONTINUATION,
})  # fmt: skip
EVERY_ACTION = frozenset(PlacementAction)


LENT_TIERS = frozenset((Tier.DEVICE, Tier.HOST))
"""What a worker is taken to lend that does not say: nobody sends from a disk."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile says what one routing unit is. Candidates are filtered by it; state moves only
    between equal digests.

    `model` "": any. `adapters` are names it answers to beside `model`. `spec_digest`: of the
    attention spec, numerics and layout version. `actions`: the placement actions that it can carry
    out as the worker that runs the turn; nothing else in the router asks which engine it is.
    """

    model: str = ""
    adapters: frozenset[str] = frozenset()
    spec_digest: str = ""
    role: WorkerRole = WorkerRole.HYBRID
    speed: Speed = DEFAULT_SPEED
    actions: frozenset[PlacementAction] = EVERY_ENGINE
    kv_bytes_total: int = 0
    """Device memory for state; 0: unknown, taken as enough."""
    tier_bytes: Mapping[Tier, int] = {}
    """What each tier of its own below the device keeps, where it says so."""
    are_tokens_sized: bool = True
    """Whether it said what a token takes of its memory; else `speed` has an assumed size, by which
    nobody is held at the door."""
    sequence_tokens: int = 0
    """The longest sequence it takes; 0: not said."""
    is_prefill_measured: bool = True
    """Whether its prefill was measured; else `speed` has an assumed one, and its like that have
    measured theirs stand in for it (fleet.PresumedSpeeds)."""
    lends: frozenset[Tier] = LENT_TIERS
    """The tiers from which other workers read its state."""
    are_steps_measured: bool = True
    """Whether its decode steps were measured, in the same way."""
    frees_prompts: bool = False
    """Whether it frees what it computed for another worker once that one has it."""

    @property
    def is_measured(self) -> bool:
        """`is_measured` tells whether the worker has measured its own speed."""
        return self.is_prefill_measured and self.are_steps_measured

    @property
    def names(self) -> frozenset[str]:
        """`names` are all models that the worker answers to."""
        return self.adapters | {self.model}


UNKNOWN = Profile()


TRANSIT_S = 0.002
"""How long a request may be on its way to the worker beyond the fastest answer's way back."""

DRIFT = 1e-4
"""How fast two clocks may part; the smallest difference is let grow by it."""

RECENT_MAX = 256
"""Dispatches a worker that may be younger than its next stamp; all others count as seen."""

_INFINITE = float("inf")


Receipt = NewType("Receipt", int)
"""Stands for one counted dispatch. Single-use: it is given back exactly once (invariant 5)."""


class Load(msgspec.Struct, gc=False):
    """A load is what one dispatch counts for at a worker; all of it is 0 once it was taken off.

    It does not name the worker, which remembers it: such a ring would never be freed (gc=False).
    """

    at_s: float
    prefill_tokens: int
    held_tokens: int
    sequences: int = 1


class LoadEstimate(msgspec.Struct, gc=False):
    """An estimate is everybody's load at a worker, as far as it is known. Read it at once: it
    changes in place.

    `pending_tokens` of prefill stand before a new request, for `queue_ms`. `kv_bytes_free` is what
    a new turn could have, free or evictable, and infinite where nothing is known; `occupancy` the
    share that holds state, in use or evictable, then 0. `refill_shares` and `busy_share` are the
    worker's last word (kv.wire.status): empty and None where it does not say.
    """

    pending_tokens: int = 0
    queue_ms: float = 0.0
    kv_bytes_free: float = float("inf")
    occupancy: float = 0.0
    refill_shares: tuple[RefillShare, ...] = ()
    busy_share: float | None = None

    def refill_share(self, tokens: float) -> float | None:
        """Return the part of its time that the worker would spend on bringing back what it
        displaces if it took `tokens` of new state, behind what waits there; None where it does not
        say."""
        return refill_share_at(self.refill_shares, tokens + self.pending_tokens)


class Watch:
    """A watch is what an order is told by the workers that stand in it: who changed, and how many
    sequences they run in all."""

    __slots__ = ("changed", "sequences")

    def __init__(self) -> None:
        self.changed: set[Worker] = set()
        """Since the order was last asked for."""
        self.sequences = 0
        """At all of them now."""


class Worker:
    """A worker is one routing unit: a data-parallel rank of an engine process, in its present life.

    `requests`, `pending_prefill_tokens`, `held_tokens` are this router's own dispatches; `batch` is
    how many of everybody's sequences run or wait here; `load`, and most of its fields under their
    own names, the present estimate of the rest. A change (`refresh`) marks that old, who asks next
    has it made anew: a turn changes its worker's load six times, and is decided once.
    """

    __slots__ = (
        "_clock_s",
        "_delta_batch",
        "_delta_held",
        "_delta_pending",
        "_load",
        "_recent",
        "_stamp",
        "_stamped_batch",
        "batch",
        "bound_sessions",
        "dp_rank",
        "held_tokens",
        "id",
        "incarnation",
        "is_drained",
        "is_old",
        "is_silent",
        "life",
        "order",
        "passed",
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
        self.is_silent = False
        """Whether it is down for its silence alone: it may be asked when nobody is up."""
        self.is_drained = False
        """Whether it is down by its operator's word alone: it answers, and may be asked to hand
        sessions over."""
        self.incarnation: Incarnation | None = None
        self.life = 0
        """Grows with each incarnation; copies in volatile tiers are good for one life."""
        self.profile: Profile = UNKNOWN
        self.speed = UNKNOWN.speed
        self.watchers: tuple[Watch, ...] = ()
        """The orders that it stands in (fleet.py): they hear that its load has changed."""
        self.bound_sessions = 0
        self.passed = 0
        """The number of the last dispatch here that no session stood behind; of workers that are
        alike, that one is next of whom it is least."""
        self.requests = self.pending_prefill_tokens = self.held_tokens = 0
        self.batch = 0
        self.is_old = False
        """Whether its load has changed since it was estimated."""
        self._load = LoadEstimate()
        self._recent: deque[Load] = deque(maxlen=RECENT_MAX)
        self._stamp: WorkerLoad | None = None
        self._stamped_batch = 0
        self._clock_s = float("inf")
        self._delta_pending = self._delta_batch = self._delta_held = 0

    @property
    def unit(self) -> RoutingUnit | None:
        """The worker in its present life; None where workers do not tell their lives apart."""
        if self.incarnation is None:
            return None
        return RoutingUnit(self.id, self.dp_rank, self.incarnation)

    def become(self, profile: Profile, speed: Speed) -> None:
        """Set what the worker says that it is, and the speed that it is priced at
        (fleet.PresumedSpeeds)."""
        self.profile, self.speed = profile, speed
        self.refresh()

    def begin_life(self, incarnation: Incarnation | None) -> None:
        """Begin the life of a new process: what the old one held in volatile tiers is gone at
        once."""
        self.incarnation = incarnation
        self.life += 1
        self.bound_sessions = 0
        self._forget_stamps()
        self.refresh()

    def stamp(self, status: WorkerLoad, now_s: float) -> None:
        """Take the worker's word, and add what was dispatched since it was given."""
        known = self._stamp
        if known is not None and status.as_of <= known.as_of:
            return  # a later one was heard before
        if known is not None:
            self._clock_s += DRIFT * (status.as_of - known.as_of)
        self._stamp = status
        behind_s = now_s - status.as_of
        if behind_s < self._clock_s:
            self._clock_s = behind_s
        seen_until_s = status.as_of + self._clock_s - TRANSIT_S
        pending = batch = held = 0
        for load in reversed(self._recent):
            if load.at_s <= seen_until_s:
                break
            pending += load.prefill_tokens
            held += load.held_tokens
            batch += load.sequences
        self._delta_pending, self._delta_batch, self._delta_held = pending, batch, held
        self._stamped_batch = status.running_sequences + status.waiting_sequences
        self._recount()
        self.refresh()

    def add(self, load: Load) -> None:
        """Count a dispatch of this router's own."""
        self.requests += 1
        self.pending_prefill_tokens += load.prefill_tokens
        self.held_tokens += load.held_tokens
        self._delta_pending += load.prefill_tokens
        self._delta_held += load.held_tokens
        self._delta_batch += load.sequences
        self._recount()
        self._recent.append(load)
        if not self.is_old:
            self.refresh()

    def take_prefill(self, load: Load) -> None:
        """Take the dispatch's prefill, which is over, off the load."""
        self.pending_prefill_tokens -= load.prefill_tokens
        self._delta_pending -= load.prefill_tokens
        load.prefill_tokens = 0
        if not self.is_old:
            self.refresh()

    def take(self, load: Load) -> None:
        """Take what is left of a dispatch that has ended off the load. Raises InvariantViolated
        when a sum falls below zero."""
        self.requests -= 1
        self.pending_prefill_tokens -= load.prefill_tokens
        self.held_tokens -= load.held_tokens
        self._delta_pending -= load.prefill_tokens
        self._delta_held -= load.held_tokens
        self._delta_batch -= load.sequences
        self._recount()
        load.prefill_tokens = load.held_tokens = load.sequences = 0
        if self.requests < 0 or self.pending_prefill_tokens < 0 or self.held_tokens < 0:
            raise InvariantViolated(f"invariant 5: load of {self.id} went below zero")
        if not self.is_old:
            self.refresh()

    def refresh(self) -> None:
        """Tell the orders that the worker stands in that its load has changed."""
        if not self.is_old:
            self.is_old = True
            for watch in self.watchers:
                watch.changed.add(self)

    def _recount(self) -> None:
        """Count the sequences anew, here and in the sums of the orders that the worker stands
        in."""
        batch = self._stamped_batch + self._delta_batch
        if batch < 0:
            batch = 0
        more = batch - self.batch
        if more:
            self.batch = batch
            for watch in self.watchers:
                watch.sequences += more

    def _estimate(self) -> LoadEstimate:
        """Make the estimate of the load anew, in place, and return it."""
        self.is_old = False
        load, stamp, pending = self._load, self._stamp, self._delta_pending
        if stamp is None:
            total = free = self.profile.kv_bytes_total
            evictable = 0
            load.refill_shares, load.busy_share = (), None
        else:
            total, free = stamp.kv_bytes_total, stamp.kv_bytes_free
            evictable = stamp.kv_bytes_evictable
            pending += stamp.pending_prefill_tokens
            load.refill_shares, load.busy_share = stamp.refill_shares, stamp.busy_share
        if pending > 0:
            prefill = self.speed.prefill
            token_ms = prefill.b_ms
            if self.requests:
                token_ms += prefill.c_ms * (self.held_tokens / self.requests)
            load.pending_tokens, load.queue_ms = pending, pending * token_ms
        else:
            load.pending_tokens, load.queue_ms = 0, 0.0
        if total:
            speed = self.speed
            unused = free - self._delta_held * speed.kv_bytes_per_token
            if self._delta_batch > 0:
                unused -= self._delta_batch * speed.kv_bytes_per_sequence
            load.kv_bytes_free = min(max(unused + evictable, 0.0), total)
            load.occupancy = 1.0 - min(max(unused, 0.0), total) / total
        else:
            load.kv_bytes_free, load.occupancy = _INFINITE, 0.0
        return load

    @property
    def load(self) -> LoadEstimate:
        """The present estimate of everybody's load here."""
        return self._estimate() if self.is_old else self._load

    @property
    def pending_tokens(self) -> int:
        """`pending_tokens` counts prompt tokens that wait for their computing there."""
        return self._estimate().pending_tokens if self.is_old else self._load.pending_tokens

    @property
    def queue_ms(self) -> float:
        """`queue_ms` is how long computing them takes, in ms."""
        return self._estimate().queue_ms if self.is_old else self._load.queue_ms

    @property
    def occupancy(self) -> float:
        """`occupancy` is the share of its memory that is taken."""
        return self._estimate().occupancy if self.is_old else self._load.occupancy

    def _forget_stamps(self) -> None:
        self._stamp, self._stamped_batch = None, 0
        self._clock_s = float("inf")
        self._delta_pending = self.pending_prefill_tokens
        self._delta_batch, self._delta_held = self.requests, self.held_tokens
        self._recount()
