"""These messages are what is asked of the directory and what it answers: events and outcomes of its
state machine.

Every request that may lead to an epoch carries `seen`, the highest epoch that its sender knows: a
directory that is behind it has lost memory without noticing, and starts a new term above it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from ownerserve.directory.rules import MAIN_KINDS, Kinds, TierCode
from ownerserve.kv.ids import PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term


class DirectoryRefusal(StrEnum):
    """A DirectoryRefusal says why the directory changed nothing. A metric label."""

    UNKNOWN_HOLDER = "unknown_holder"  # register first: the directory does not know you (any more)
    STALE_INCARNATION = "stale_incarnation"  # a later life of this unit has registered
    LEASE_LAPSED = "lease_lapsed"  # all that you owned may be another's; register again
    REBUILDING = "rebuilding"  # a directory without memory waits until old leases have run out
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_PREFIX = "unknown_prefix"
    NOT_OWNER = "not_owner"
    TARGET_NOT_LIVE = "target_not_live"
    SESSION_LOCAL = "session_local"  # this kind of state may not be held there (rules.py)
    LAST_COPY = "last_copy"  # spill it first: forks stand on it
    NOT_REPLICATED = "not_replicated"  # done on the primary, not known to be safe; ask again
    UNREACHABLE = "unreachable"  # may or may not be done; ask again
    CONTENDED = "contended"  # others kept changing the same records; nothing done, ask again
    MALFORMED = "malformed"


# ---- requests: holders


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A life of a routing unit begins, or comes back after its lease lapsed."""

    unit: RoutingUnit
    seen: Epoch | None = None


class RenewLease(msgspec.Struct, frozen=True, tag="renew_lease", gc=False):
    """A unit extends its lease, which covers all that it owns: a heartbeat costs one message, not
    one an extent.

    `memory`: the directory's when it gave the lease. A later memory may know the unit by a
    `Register` that was long on its way, and nothing of what it owns. None: not known to who renews.
    """

    unit: RoutingUnit
    seen: Epoch | None = None
    memory: Term | None = None


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """The unit leaves the fleet: its copies and claims are free at once."""

    unit: RoutingUnit


class HeldExtent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A held extent is a line of an inventory: `kinds` of tokens [0, tokens) of a prefix are held
    in `tier`. `epoch`: under which the sender has last-copy duty; None: the copy is read-only.
    """

    prefix_hash: PrefixHash
    tokens: int
    tier: TierCode
    kinds: Kinds
    group: str = ""
    epoch: Epoch | None = None


class HeldSession(msgspec.Struct, frozen=True, array_like=True):
    """A held session is one that the sender owns under `epoch`, by its own unbroken lease: for a
    directory that has forgotten.
    """

    session_id: SessionId
    version: int
    prefix_hash: PrefixHash | None
    tokens: int
    epoch: Epoch


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """A unit tells a part of its inventory: what it holds, verified, and what it no longer holds.

    `left`: extents whose session has gone on from there. Their copies are the first part of longer
    ones that are told of; here they are known only as long as another session stands on them.
    """

    unit: RoutingUnit
    extents: tuple[HeldExtent, ...] = ()
    gone: tuple[tuple[PrefixHash, TierCode], ...] = ()
    sessions: tuple[HeldSession, ...] = ()
    seen: Epoch | None = None
    left: tuple[tuple[PrefixHash, TierCode], ...] = ()


# ---- requests: sessions


class Bind(msgspec.Struct, frozen=True, tag="bind", gc=False):
    """`unit` wants to own the session. `parent`: the session that it is a fork of, on whose prefix
    it then stands."""

    session_id: SessionId
    unit: RoutingUnit
    parent: SessionId | None = None
    seen: Epoch | None = None


class Transfer(msgspec.Struct, frozen=True, tag="transfer", gc=False):
    """The owner hands its session over by compare and set: if it is still `source` at `epoch` and
    `version`, the owner is `target`; with NO_UNIT it is nobody, and who asks next.

    Only the source may ask, after it stopped serving the session.
    """

    session_id: SessionId
    source: RoutingUnit
    target: RoutingUnit
    epoch: Epoch
    version: int
    seen: Epoch | None = None


class Advance(msgspec.Struct, frozen=True, tag="advance", gc=False):
    """The owner finished turns: `version` of them in all, and the session stands on `prefix_hash`.

    The prefix is claimed too: `unit` holds `kinds` of it in `tier`, with last-copy duty where
    nobody alive has it. Taken if the epoch is the record's and the version higher, so that several
    turns go as one. One that comes twice is answered as before, one that comes late by `Conflict`.
    """

    session_id: SessionId
    unit: RoutingUnit
    epoch: Epoch
    version: int
    prefix_hash: PrefixHash
    tokens: int
    tier: TierCode = TierCode.DEVICE
    kinds: Kinds = MAIN_KINDS
    group: str = ""
    seen: Epoch | None = None


class EndSession(msgspec.Struct, frozen=True, tag="end_session", gc=False):
    """The owner ends the session: it is over, or idle for too long."""

    session_id: SessionId
    unit: RoutingUnit
    epoch: Epoch


class FindSession(msgspec.Struct, frozen=True, tag="find_session"):
    """A router asks who owns the session. It may have `seen` a later epoch than the directory
    remembers."""

    session_id: SessionId
    seen: Epoch | None = None


# ---- requests: prefixes


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """A unit asks whether it may drop its copy in `tier`: before it does, not after."""

    prefix_hash: PrefixHash
    unit: RoutingUnit
    tier: TierCode


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Somebody asks for the first of `candidates` that a unit that lives holds."""

    candidates: tuple[PrefixHash, ...]


class ReplicateReadonly(msgspec.Struct, frozen=True, tag="replicate_readonly"):
    """Somebody wishes that the unit that lives at that place hold a read-only copy. The wish is
    written down until such a copy is told of or the unit's life is over; a gateway that finds it
    has the copy made."""

    prefix_hash: PrefixHash
    worker: WorkerId
    dp_rank: int = 0


class FindGroup(msgspec.Struct, frozen=True, tag="find_group"):
    """Somebody asks for the hot prefixes of a repository or document."""

    group: str


Request: TypeAlias = (
    Register | RenewLease | Retire | Publish | Bind | Transfer | Advance | EndSession | FindSession
    | Drop | Lookup | FindGroup | ReplicateReadonly
)  # fmt: skip


# ---- outcomes


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """The unit has a lease of `lease_s` from when it *sent* the request: by its own clock the lease
    then ends before it does by the directory's. `memory` is to be named when it is renewed.
    """

    lease_s: float
    memory: Term | None = None


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """The unit has left: nothing is held by this life any more."""


class Published(msgspec.Struct, frozen=True, tag="published"):
    """An inventory's part is taken over. `adopted`: sessions that are the sender's; the others that
    it reported belong to a later owner. `forked`: copies that were left and stay known, since other
    sessions stand on them. `lost`: prefixes whose last living copy is gone, and a session stood on.
    """

    adopted: tuple[SessionId, ...] = ()
    forked: tuple[tuple[PrefixHash, TierCode], ...] = ()
    lost: tuple[PrefixHash, ...] = ()


class SessionIs(msgspec.Struct, frozen=True, tag="session_is"):
    """The session stands as this says. `owner_live` False: its owner's lease ran out, anyone may
    bind it.
    """

    owner: RoutingUnit
    epoch: Epoch
    version: int
    prefix_hash: PrefixHash | None
    tokens: int
    owner_live: bool


class Bound(msgspec.Struct, frozen=True, tag="bound", gc=False):
    """The session is the asker's (or, after a transfer, the target's) under `epoch`."""

    epoch: Epoch
    version: int
    prefix_hash: PrefixHash | None
    tokens: int


class HeldBy(msgspec.Struct, frozen=True, tag="held_by"):
    """The session cannot be bound: `owner`, whose lease runs, has it under `epoch`."""

    owner: RoutingUnit
    epoch: Epoch


class Conflict(msgspec.Struct, frozen=True, tag="conflict"):
    """A compare-and-set failed: the session is now as `current` says."""

    current: SessionIs


class Advanced(msgspec.Struct, frozen=True, tag="advanced", gc=False):
    """The report is taken, or was before. `duty`: the epoch of last-copy duty for the tip, where
    the owner took it on with this report.
    """

    duty: Epoch | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The directory has forgotten the session."""


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The copy may go; nobody is sent to it any more."""


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Somebody alive holds a prefix that was looked up: `locations` are its living copies, nearest
    tier first. `owner` None: nobody has last-copy duty. `wanted`: units that are to hold a
    read-only copy, and do not yet.
    """

    prefix_hash: PrefixHash
    tokens: int
    owner: RoutingUnit | None
    locations: tuple[tuple[RoutingUnit | None, TierCode, Kinds], ...]
    refs: int
    group: str
    wanted: tuple[RoutingUnit, ...] = ()


class Wished(msgspec.Struct, frozen=True, tag="wished"):
    """The wish is written down: `wanted` are all units that are to hold a read-only copy, without
    the one that was named where it has one."""

    wanted: tuple[RoutingUnit, ...]


class Miss(msgspec.Struct, frozen=True, tag="miss"):
    """There is no such prefix that somebody alive holds, or no such session."""


class GroupIs(msgspec.Struct, frozen=True, tag="group_is"):
    """The group has these members (prefix hash, how many sessions came to stand on it), most used
    first.
    """

    members: tuple[tuple[PrefixHash, int], ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The directory changed nothing, unless the reason says so. The request may go again after
    `retry_after_s`; 0: when its sender would ask again."""

    reason: DirectoryRefusal
    retry_after_s: float = 0.0


Outcome: TypeAlias = (
    Leased | Retired | Published | SessionIs | Bound | HeldBy | Conflict | Advanced | Ended
    | Dropped | Found | Wished | Miss | GroupIs | Refused
)  # fmt: skip
