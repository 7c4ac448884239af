"""What happens to a node and what it asks for: the vocabulary between `state` and `runtime`.

An operation is one thing asked of the store, by number; what comes of it comes back under the same
number, late, twice or not at all. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from ownerserve.cache.pressure import Checkpoint
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.node.vocabulary.records import Inside, Tip
from ownerserve.plan.inputs import Backlog
from ownerserve.plan.outcome import RestorePlan
from ownerserve.store.format.model import SHARED, Meta, MissReason, Want

OperationId = int


# ---- events


class TurnArrived(msgspec.Struct, frozen=True):
    """A turn is here; it must not run before its `Start`."""

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


class RecordsFound(msgspec.Struct, frozen=True):
    """The catalogue's answer to `FindRecords`: where each id is, as a hint. Absent ones lack.

    `inside` are records that were not asked for by id and hold one of the boundaries; their ids
    are in `held` too.
    """

    operation_id: OperationId
    held: Mapping[bytes, Tier]
    inside: tuple[Inside, ...] = ()


class DeviceAsked(msgspec.Struct, frozen=True):
    """The engine has a place for the turn, and has told its device what of it is there."""

    turn_id: TurnId


class DevicePlaced(msgspec.Struct, frozen=True):
    """The engine took the offer: the turn has the blocks that it goes into."""

    turn_id: TurnId


class Fetched(msgspec.Struct, frozen=True):
    """A `Fetch` is done: every want is at hand and verified."""

    operation_id: OperationId


class NotFetched(msgspec.Struct, frozen=True):
    """A `Fetch` gave nothing: `id` is what failed first (empty: nobody knows)."""

    operation_id: OperationId
    reason: MissReason
    id: bytes = b""


class Filled(msgspec.Struct, frozen=True):
    """A `Fill` is done: the bytes are in the slots. `ids` are the records they came from."""

    operation_id: OperationId
    ids: tuple[bytes, ...]


class TurnEnded(msgspec.Struct, frozen=True):
    """The turn is over. `restored` tokens were not computed; `prompt` + output are `tokens`."""

    turn_id: TurnId
    restored: int
    prompt: int
    tokens: int


class TurnGone(msgspec.Struct, frozen=True):
    """The turn was given up, wherever it was."""

    turn_id: TurnId


class SessionOver(msgspec.Struct, frozen=True):
    """The session has ended: its state is what any prompt may find, and nobody asks for it by
    name."""

    session_id: SessionId


class Kept(msgspec.Struct, frozen=True):
    """A `StoreCopy` is stored, and is READY: it has its digest."""

    operation_id: OperationId


class NotKept(msgspec.Struct, frozen=True):
    """A `StoreCopy` was refused or failed; nothing of it is left behind."""

    operation_id: OperationId


class Located(msgspec.Struct, frozen=True):
    """Which of the ids of a `Locate` each tier has. Empty: there was no answer."""

    operation_id: OperationId
    held: Mapping[Tier, frozenset[bytes]]


class RecordsLost(msgspec.Struct, frozen=True):
    """Records went from a tier: evicted, expired or quarantined. `ends` are the prefix hashes at
    their ends; `unnoted`: that many more went, and nobody knows which."""

    ends: tuple[PrefixHash, ...]
    unnoted: int = 0


class Remembered(msgspec.Struct, frozen=True):
    """What a former life of this worker wrote down: sessions whose state should be in the store."""

    tips: tuple[Tip, ...]


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Computing(msgspec.Struct, frozen=True):
    """A step is on its way that computes tokens [start, end) of the turn, in the engine's blocks.

    `added` are the turn's tokens that the node was not told yet, up to at most `end`.
    """

    turn_id: TurnId
    start: int
    end: int
    added: Packed = b""


Completion = RecordsFound | Fetched | NotFetched | Filled | Kept | NotKept | Located
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
    | SessionOver
    | Kept
    | NotKept
    | Located
    | RecordsLost
    | Remembered
    | Tick
)


# ---- effects


class FindRecords(msgspec.Struct, frozen=True):
    """Which of `ids` are stored, and where? And which records hold the first of `boundaries` that
    any holds: a branch shares only the beginning of those."""

    operation_id: OperationId
    ids: tuple[bytes, ...]
    deadline_s: float
    boundaries: tuple[bytes, ...] = ()
    tenant: bytes = SHARED


class Fetch(msgspec.Struct, frozen=True):
    """Read and verify all `wants`, or none."""

    operation_id: OperationId
    wants: tuple[Want, ...]
    deadline_s: float


class Filling(msgspec.Struct, frozen=True):
    """Part `part` of a fetch goes into these slots of `component`."""

    part: int
    component: str
    slots: tuple[int, ...]


class Fill(msgspec.Struct, frozen=True):
    """Write into slots what was fetched under the same operation."""

    operation_id: OperationId
    fillings: tuple[Filling, ...]


class Offer(msgspec.Struct, frozen=True):
    """State up to `position` can be had from outside. Nothing is reserved or read yet."""

    turn_id: TurnId
    position: int


class FetchAndFill(msgspec.Struct, frozen=True):
    """Read and verify all `wants`, then write them: a `Fetch` and its `Fill` in one.

    The performer answers when no write is under way any more, and by `deadline_s` at the latest.
    """

    turn_id: TurnId
    operation_id: OperationId
    wants: tuple[Want, ...]
    fillings: tuple[Filling, ...]
    deadline_s: float


class DropOperation(msgspec.Struct, frozen=True):
    """Nobody waits for this operation any more."""

    operation_id: OperationId


class Start(msgspec.Struct, frozen=True):
    """Nothing more will come: the turn may run."""

    turn_id: TurnId


class StoreCopy(msgspec.Struct, frozen=True):
    """Copy these slots out, now, and store them as `meta`: one unit a slot, in order.

    `restore_cost_ms` is what a hit without this record would cost more, by measured prices: the
    store keeps by it.
    """

    operation_id: OperationId
    meta: Meta
    component: str
    slots: tuple[int, ...]
    restore_cost_ms: float = 0.0


class Pin(msgspec.Struct, frozen=True):
    """Keep what the point at `position` of the turn is made of; what was kept before may go."""

    turn_id: TurnId
    position: int


class Locate(msgspec.Struct, frozen=True):
    """Which of `ids` has each tier? For what is told to others: no turn waits for it."""

    operation_id: OperationId
    ids: tuple[bytes, ...]
    deadline_s: float


class Remember(msgspec.Struct, frozen=True):
    """Write down, beside the store, that the tip is there: for the next life of this worker."""

    tip: Tip


class Forget(msgspec.Struct, frozen=True):
    """Strike out what was written down of the session."""

    session_id: SessionId


Effect = (
    FindRecords
    | Fetch
    | Fill
    | Offer
    | FetchAndFill
    | DropOperation
    | Start
    | StoreCopy
    | Pin
    | Checkpoint
    | Locate
    | Remember
    | Forget
)


# ---- what came of it


class RestoreOutcome(StrEnum):
    """What came of a turn's restore: a metric label, one a turn."""

    RESIDENT = "resident"
    """The device had all there was to have: the store was not asked."""
    NOTHING_STORED = "nothing_stored"
    NOT_WORTH_IT = "not_worth_it"
    """The store had some; the plan prefers to go on without."""
    LOADED = "loaded"
    MISS = "miss"
    """What was to be loaded could not be read or verified."""
    LATE = "late"
    NO_ROOM = "no_room"
    GONE = "gone"


class RestoreReport(msgspec.Struct, frozen=True):
    """What came of one turn's restore, for logs and metrics. `plan` is the last one made."""

    outcome: RestoreOutcome
    plan: RestorePlan | None
    waited_s: float
    loaded_bytes: int = 0
    loaded_point_bytes: int = 0
    brought_tokens: int = 0
    """Tokens that are at hand because of the load; those before were so without it."""
    misses: int = 0
