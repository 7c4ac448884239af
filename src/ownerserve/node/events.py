"""What happens to a node and what it asks for: the vocabulary between `state` and `runtime`.

An errand is one thing asked of the store, by number; what comes of it comes back under the same
number, late, twice or not at all. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.plan.inputs import Backlog, Tier
from ownerserve.plan.outcome import RestorePlan
from ownerserve.store.model import Meta, MissReason, Want

Errand = int


# ---- events


class Arrived(msgspec.Struct, frozen=True):
    """A turn is here. It is not to run before its `Start`."""

    turn_id: TurnId
    session_id: SessionId | None
    tokens: Packed
    backlog: Backlog = Backlog()


class Found(msgspec.Struct, frozen=True):
    """The catalogue's answer to a `Find`: where each id is, as a hint. Absent ones are left out."""

    errand: Errand
    held: Mapping[bytes, Tier]


class Fetched(msgspec.Struct, frozen=True):
    """A `Fetch` is done: every want is at hand and verified."""

    errand: Errand


class NotFetched(msgspec.Struct, frozen=True):
    """A `Fetch` gave nothing: `id` is what failed first (empty: nobody knows)."""

    errand: Errand
    reason: MissReason
    id: bytes = b""


class Filled(msgspec.Struct, frozen=True):
    """A `Fill` is done: the bytes are in the slots. `ids` are the records they came from."""

    errand: Errand
    ids: tuple[bytes, ...]


class Ended(msgspec.Struct, frozen=True):
    """The turn is over. `restored` tokens were not computed; `prompt` + output are `tokens`."""

    turn_id: TurnId
    restored: int
    prompt: int
    tokens: int


class Gone(msgspec.Struct, frozen=True):
    """The turn was given up, wherever it was."""

    turn_id: TurnId


class Kept(msgspec.Struct, frozen=True):
    """A `Copy` is stored, and is READY: it has its digest."""

    errand: Errand


class NotKept(msgspec.Struct, frozen=True):
    """A `Copy` was refused or failed; nothing of it is left behind."""

    errand: Errand


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Arrived | Found | Fetched | NotFetched | Filled | Ended | Gone | Kept | NotKept | Tick


# ---- effects


class Find(msgspec.Struct, frozen=True):
    """Which of `ids` are stored, and where?"""

    errand: Errand
    ids: tuple[bytes, ...]
    deadline_s: float


class Fetch(msgspec.Struct, frozen=True):
    """Read and verify all `wants`, or none."""

    errand: Errand
    wants: tuple[Want, ...]
    deadline_s: float


class Filling(msgspec.Struct, frozen=True):
    """Part `part` of a fetch goes into these slots of `component`."""

    part: int
    component: str
    slots: tuple[int, ...]


class Fill(msgspec.Struct, frozen=True):
    """Write what was fetched under `errand` into slots."""

    errand: Errand
    fillings: tuple[Filling, ...]


class Drop(msgspec.Struct, frozen=True):
    """Nobody waits for this errand any more."""

    errand: Errand


class Start(msgspec.Struct, frozen=True):
    """Nothing more will come: the turn may run."""

    turn_id: TurnId


class Copy(msgspec.Struct, frozen=True):
    """Copy these slots out, now, and store them as `meta`: one unit a slot, in order."""

    errand: Errand
    meta: Meta
    component: str
    slots: tuple[int, ...]


Effect = Find | Fetch | Fill | Drop | Start | Copy


# ---- what came of it


class RestoreOutcome(StrEnum):
    """What came of a turn's wish for state. A metric label; one a turn."""

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
    """One turn's restore, for logs and metrics. `plan` is the last one that was made."""

    outcome: RestoreOutcome
    plan: RestorePlan | None
    waited_s: float
    loaded_bytes: int = 0
    misses: int = 0
