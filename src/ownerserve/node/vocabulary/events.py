"""Events tell a node what happened, and effects are how it asks for something: the vocabulary
between `state` and `runtime`.

An operation is one thing asked of the store, by number; what comes of it comes back under the same
number, late, twice or not at all. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from ownerserve.cache.effects import MoveBorder
from ownerserve.cache.pressure import Checkpoint
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.messages import ExecutionMode, RestoreAction, Tier
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import NO_NONCE, Nonce
from ownerserve.node.vocabulary.records import Inside, Tip
from ownerserve.plan.inputs import Backlog
from ownerserve.plan.outcome import Basis, RestorePlan
from ownerserve.store.format.model import SHARED, Meta, MissReason, Want

OperationId = int


# ---- events


class PrefillOrder(msgspec.Struct, frozen=True, eq=False):
    """A prefill order asks another worker to compute a prompt, which is read from there: the ids of
    its `tokens`, little-endian uint32, whose state is apart by `cache_salt`. `worker` None: that of
    those that this node knows which has the least to do, where much is to be computed. `leg`: a
    gateway asks for it too, in a leg of that number."""

    worker: LenderAddress | None
    tokens: bytes
    cache_salt: str = ""
    leg: Nonce = NO_NONCE


class TurnArrived(msgspec.Struct, frozen=True):
    """Event: a turn is here; the engine must not run it before its `Start`."""

    turn_id: TurnId
    session_id: SessionId | None
    tokens: Packed
    backlog: Backlog = Backlog()
    tenant: bytes = b""
    """The tenant whose state it may use and makes; empty: what all share."""
    hashed: HashedPrefix | None = None
    """The digests of `tokens`, where somebody has made them before; the node's from now on."""
    parent: SessionId | None = None
    """The session that this one was forked from: it stands on what the parent has left."""
    lender: LenderAddress | None = None
    """`lender` holds more of the prompt, by the gateway's word."""
    lent_as: SessionId | None = None
    """The session that `lender` holds it of; None: that of the turn."""
    order: PrefillOrder | None = None
    """`order` says who is to compute the prompt, in place of a lender."""
    within_s: float | None = None
    """How long its state may take to come; None: as the node's settings say."""


class SessionComing(msgspec.Struct, frozen=True, eq=False):
    """Event: the session is to move here from `lender`, or a replica of its beginning is to come:
    the state that `hashed` names is brought for the turn `turn_id`, which nobody runs. `CameIn`
    answers; `TurnGone` gives it up."""

    turn_id: TurnId
    session_id: SessionId
    hashed: HashedPrefix
    lender: LenderAddress


class SessionCame(msgspec.Struct, frozen=True, eq=False):
    """Event: the session is this node's, and its cache has its record: it is idle here. `hashed`:
    all of its whole blocks."""

    session_id: SessionId
    hashed: HashedPrefix


class PrefixCame(msgspec.Struct, frozen=True, eq=False):
    """Event: the cache has a record of the session's first whole blocks, which `hashed` names: a
    replica that is nobody's here."""

    session_id: SessionId
    hashed: HashedPrefix


class SessionLeaves(msgspec.Struct, frozen=True):
    """Event: the idle session is to be in the store, whatever its gap; `PutAway` answers it."""

    session_id: SessionId


class RecordsFound(msgspec.Struct, frozen=True):
    """Event: the catalogue has answered a `FindRecords`. `held` says where each id is, as a hint;
    ids that are not stored are not in it.

    `inside` are records that were not asked for by id and hold one of the boundaries; their ids
    are in `held` too. A peer has what it holds of them at hand in `peer_ready_ms`.
    """

    operation_id: OperationId
    held: Mapping[bytes, Tier]
    inside: tuple[Inside, ...] = ()
    peer_ready_ms: float = 0.0


class DeviceAsked(msgspec.Struct, frozen=True):
    """Event: the engine has a place for the turn, and its device now knows how much of the turn's
    prompt is on it."""

    turn_id: TurnId


class DevicePlaced(msgspec.Struct, frozen=True):
    """Event: the engine took the `Offer`, and the turn has the blocks into which state is to be
    brought."""

    turn_id: TurnId


class Fetched(msgspec.Struct, frozen=True):
    """Event: a `Fetch` is done; every want is in memory and verified."""

    operation_id: OperationId


class NotFetched(msgspec.Struct, frozen=True):
    """Event: a `Fetch` or `FetchAndFill` brought nothing. `id` is the record that failed first;
    empty where that is not known."""

    operation_id: OperationId
    reason: MissReason
    id: bytes = b""


class Filled(msgspec.Struct, frozen=True):
    """Event: a `Fill` or `FetchAndFill` is done, and the bytes are in the slots. `ids` are the
    records that they came from."""

    operation_id: OperationId
    ids: tuple[bytes, ...]


class TurnEnded(msgspec.Struct, frozen=True):
    """Event: the turn has ended. The first `restored` of its tokens were not computed; `prompt` and
    `tokens` are the lengths, in tokens, of its prompt and of prompt and output."""

    turn_id: TurnId
    restored: int
    prompt: int
    tokens: int


class TurnGone(msgspec.Struct, frozen=True):
    """Event: the turn was given up, whether it waited or ran."""

    turn_id: TurnId


class SessionOver(msgspec.Struct, frozen=True):
    """Event: the session has ended; its state stays for any prompt that begins with it, and nobody
    asks for it by the session's name."""

    session_id: SessionId


class Copied(msgspec.Struct, frozen=True):
    """Event: the bytes of a `StoreCopy` are copied; its blocks are needed no more. What came of the
    record follows."""

    operation_id: OperationId


class Kept(msgspec.Struct, frozen=True):
    """Event: the record of a `StoreCopy` is READY in the store."""

    operation_id: OperationId


class NotKept(msgspec.Struct, frozen=True):
    """Event: a `StoreCopy` was refused or failed; nothing of it is left behind."""

    operation_id: OperationId


class Located(msgspec.Struct, frozen=True):
    """Event: a `Locate` was answered. `held` says which of its ids each tier has; it is empty where
    no answer came."""

    operation_id: OperationId
    held: Mapping[Tier, frozenset[bytes]]


class RecordsLost(msgspec.Struct, frozen=True):
    """Event: records went from a tier (evicted, expired or quarantined). `ends` are the prefix
    hashes at their ends; `unnoted` more went, and nobody knows which."""

    ends: tuple[PrefixHash, ...]
    unnoted: int = 0


class Remembered(msgspec.Struct, frozen=True):
    """Event: a former life of this worker left these tips of sessions, whose state should be in the
    store."""

    tips: tuple[Tip, ...]


class Tick(msgspec.Struct, frozen=True):
    """Event: time has passed, which lets the node do what is due."""


class Computing(msgspec.Struct, frozen=True):
    """Event: the engine has begun a step that computes tokens [start, end) of the turn, in blocks
    of its own.

    `added` are the turn's tokens that the node was not told yet, up to at most `end`.
    """

    turn_id: TurnId
    start: int
    end: int
    added: Packed = b""


Completion = RecordsFound | Fetched | NotFetched | Filled | Copied | Kept | NotKept | Located
"""What came of an operation."""

Event = (
    TurnArrived
    | RecordsFound
    | DeviceAsked
    | DevicePlaced
    | Fetched
    | NotFetched
    | Filled
    | Computing
    | TurnEnded
    | TurnGone
    | SessionComing
    | SessionCame
    | PrefixCame
    | SessionLeaves
    | SessionOver
    | Copied
    | Kept
    | NotKept
    | Located
    | RecordsLost
    | Remembered
    | Tick
)


# ---- effects


class PeerRecord(NamedTuple):
    """A peer's record is blocks [first, end) of a component, or its point at `end` where the two
    are equal."""

    component: str
    first: int
    end: int


class PeerPrefix(msgspec.Struct, frozen=True, eq=False):
    """A `PeerPrefix` is what a peer may hold of a turn's prompt: `records` of its first `tokens`
    tokens by id, cut by a grid of `grid_blocks`, whose blocks have the `digests`. It is looked for
    at its session, or its parent; to compute all of it takes some `compute_ms`. With an `order` the
    peer is to compute it for the turn, and may read the first `resident_tokens`, which this side
    has."""

    lender: LenderAddress | None
    session_id: SessionId | None
    parent: SessionId | None
    tokens: int
    digests: Sequence[PrefixHash]
    records: Mapping[bytes, PeerRecord]
    grid_blocks: int
    compute_ms: float
    turn_id: TurnId
    order: PrefillOrder | None = None
    resident_tokens: int = 0


class FindRecords(msgspec.Struct, frozen=True):
    """Effect: ask the catalogue which of `ids` are stored and where, and which of `tenant`'s
    records hold the first of `boundaries` that any record holds: a branch shares only the beginning
    of those. `peer`: a peer is asked too for what of `ids` it could lend."""

    operation_id: OperationId
    ids: tuple[bytes, ...]
    deadline_s: float
    boundaries: tuple[bytes, ...] = ()
    tenant: bytes = SHARED
    peer: PeerPrefix | None = None


class Fetch(msgspec.Struct, frozen=True):
    """Effect: read and verify all `wants`, or none, for the turn, by `deadline_s`. `computed` are
    the parts of what another worker computes for it: this one and those to come, since all that it
    computes has one reader."""

    operation_id: OperationId
    wants: tuple[Want, ...]
    deadline_s: float
    turn_id: TurnId
    computed: tuple[tuple[Want, ...], ...] = ()


class Filling(msgspec.Struct, frozen=True):
    """A `Filling` says that part `part` of a fetch goes into these slots of `component`."""

    part: int
    component: str
    slots: tuple[int, ...]


class MoveSlots(msgspec.Struct, frozen=True):
    """Effect: move the border between range blocks and point slots, before anything else is done:
    what comes needs the room."""

    moves: tuple[MoveBorder, ...]


class Fill(msgspec.Struct, frozen=True):
    """Effect: write what was fetched under the same operation into the slots of `fillings`."""

    operation_id: OperationId
    fillings: tuple[Filling, ...]


class Offer(msgspec.Struct, frozen=True):
    """Effect: tell the engine that state up to token `position` can be brought for the turn, which
    computes from `computed_from` on: below `position` it replays. Nothing is reserved or read
    yet."""

    turn_id: TurnId
    position: int
    computed_from: int


class FetchAndFill(msgspec.Struct, frozen=True):
    """Effect: read and verify all `wants`, then write them, as a `Fetch` and its `Fill` do.

    The performer answers when no write is under way any more, and by `deadline_s` at the latest.
    """

    turn_id: TurnId
    operation_id: OperationId
    wants: tuple[Want, ...]
    fillings: tuple[Filling, ...]
    deadline_s: float


class DropOperation(msgspec.Struct, frozen=True):
    """Effect: give the operation up; its answer is not waited for any more. One that was handed
    slots (`Fill`, `FetchAndFill`) is answered all the same, once nothing writes into them."""

    operation_id: OperationId


class Start(msgspec.Struct, frozen=True):
    """Effect: let the turn run; nothing more will be brought for it."""

    turn_id: TurnId


class CameIn(msgspec.Struct, frozen=True):
    """Effect: tell who moves the session which the turn stands for how bringing its state ended,
    with so many bytes."""

    turn_id: TurnId
    outcome: RestoreOutcome
    loaded_bytes: int = 0


class PutAway(msgspec.Struct, frozen=True):
    """Effect: tell who waits for it that nothing of the session is being copied any more: what was
    worth it, and fitted, is in the store."""

    session_id: SessionId


class CallOffPrefill(msgspec.Struct, frozen=True):
    """Effect: tell who was ordered to compute the turn's prompt, if anybody was, that it is not
    waited for any more."""

    turn_id: TurnId


class StoreCopy(msgspec.Struct, frozen=True):
    """Effect: copy the bytes of these slots at once and store them as `meta`: one unit a slot, in
    order.

    `restore_cost_ms` is what a hit without this record would cost more, by measured prices: the
    store keeps by it.
    """

    operation_id: OperationId
    meta: Meta
    component: str
    slots: tuple[int, ...]
    restore_cost_ms: float = 0.0


class Pin(msgspec.Struct, frozen=True):
    """Effect: keep the blocks of the point at token `position` of the turn; those of the turn's
    earlier point may go."""

    turn_id: TurnId
    position: int


class Locate(msgspec.Struct, frozen=True):
    """Effect: ask which of `ids` each tier has, by `deadline_s`. The answer is for what is told to
    others; no turn waits for it."""

    operation_id: OperationId
    ids: tuple[bytes, ...]
    deadline_s: float


class Remember(msgspec.Struct, frozen=True):
    """Effect: write the tip into the journal beside the store, for the next life of this worker."""

    tip: Tip


class Forget(msgspec.Struct, frozen=True):
    """Effect: strike the session's tip out of the journal."""

    session_id: SessionId


Effect = (
    FindRecords
    | Fetch
    | MoveSlots
    | Fill
    | Offer
    | FetchAndFill
    | DropOperation
    | CallOffPrefill
    | CameIn
    | PutAway
    | Start
    | StoreCopy
    | Pin
    | Checkpoint
    | Locate
    | Remember
    | Forget
)


# ---- what came of it


LOADS = (RestoreAction.LOAD_GLOBAL, RestoreAction.LOAD_POINT)


class RestoreOutcome(StrEnum):
    """A `RestoreOutcome` says how a turn's restore ended; each turn counts once, under this metric
    label."""

    RESIDENT = "resident"
    """The device had all there was to have: the store was not asked."""
    NOTHING_STORED = "nothing_stored"
    NOT_WORTH_IT = "not_worth_it"
    """The store had some; the plan prefers to go on without."""
    LOADED = "loaded"
    """All that was planned came. Behind any other word than this some of it may have."""
    MISS = "miss"
    """What was to be loaded could not be read or verified."""
    LATE = "late"
    NO_ROOM = "no_room"
    GONE = "gone"


class RestoreReport(msgspec.Struct, frozen=True):
    """A `RestoreReport` tells how one turn's restore went, for logs and metrics. `plan` is the last
    one made, or by which something came; `waited_s` counts from the turn's arrival; `misses` are
    reads that failed."""

    outcome: RestoreOutcome
    plan: RestorePlan | None
    waited_s: float
    loaded_bytes: int = 0
    loaded_point_bytes: int = 0
    brought: Mapping[Tier, int] = {}
    """Tokens that are at hand because of the load, by where they were read; those before were so
    without it."""
    misses: int = 0
    is_ordered: bool = False
    """Whether another worker computed some of what was loaded, for this turn."""

    @property
    def brought_tokens(self) -> int:
        """`brought_tokens` are all that were brought."""
        return sum(self.brought.values())

    def by_source(self, *, most: int) -> dict[str, int]:
        """Return the tokens that were brought, by tier, and of a prompt that was computed apart
        those of its peer by that mode's name: `most` in all, since of what came last some may be
        gone."""
        found, left = dict[str, int](), most
        for tier, tokens in self.brought.items():
            is_apart = self.is_ordered and tier is Tier.PEER
            name = ExecutionMode.REMOTE_PREFILL.value if is_apart else tier.value
            if kept := min(tokens, left):
                found[name] = kept
                left -= kept
        return found

    @property
    def loads(self) -> tuple[RestoreAction, ...]:
        """Return the ways by which state was loaded; point state comes at the end, with all."""
        if self.plan is None or not self.brought_tokens:
            return ()
        steps = (step.action for step in self.plan.chosen.steps)
        if self.outcome is RestoreOutcome.LOADED:
            return tuple(action for action in steps if action in LOADS)
        return (RestoreAction.LOAD_GLOBAL,)

    @property
    def is_trial(self) -> bool:
        """Return whether the turn loaded though computing was priced lower."""
        is_planned = self.plan is not None and self.plan.basis is Basis.TRIAL
        return is_planned and self.outcome is RestoreOutcome.LOADED
