"""Records are what the directory knows: four kinds under byte keys, equal in memory and on Valkey.

    w: worker/rank   Holder    which life of it counts, until when its lease runs
    s: session       Session   owner, epoch, version, the prefix that it stands on
    p: prefix hash   Prefix    tokens, last-copy owner, epoch, locations, forks, last access
    g: group         Group     the hot prefixes of one repository or document

A prefix record is an *extent*: tokens [0, tokens) of a chain, one for each sealed end of a turn,
never one a block. Who was alive is never written into it: a location counts while its holder's
record names the same incarnation and a running lease, so a new life drops all at once.

`epoch` stands last wherever it is: the Valkey backend appends its counter when it commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NewType, Protocol, TypeAlias

import msgspec

from ownerserve.directory.rules import Kinds, TierCode
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term

Key = NewType("Key", bytes)

UNITS_CACHED = 4096
"""Routing units whose keys are kept: every request names one."""

WISH_LIMIT = 16
"""Wishes for copies that one prefix remembers; beyond, the oldest goes."""

GROUP_LIMIT = 64
"""Prefixes that one group remembers; beyond, the least used goes."""


class HolderRecord(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A holder's record is a routing unit's present life and its lease. The record outlives every
    life, so that messages of former ones are known for what they are.
    """

    incarnation: Incarnation
    lease_until_s: float
    memory: Term | None = None
    """The term in which this life was first written down here."""


class SessionRecord(msgspec.Struct, frozen=True, array_like=True, tag="s", gc=False):
    """A session's record says who owns it and how far it has come. `version`: turns that its owners
    finished, the same after Bind and Transfer; `prefix_hash`: its tip, None before the first seal.
    """

    owner: RoutingUnit
    version: int
    prefix_hash: PrefixHash | None
    tokens: int
    last_access_s: float
    epoch: Epoch


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A location is a copy of a prefix. `unit` None: in the shared remote tier, which every worker
    reads (and verifies).
    """

    unit: RoutingUnit | None
    tier: TierCode
    kinds: Kinds


class PrefixRecord(msgspec.Struct, frozen=True, array_like=True, tag="x", gc=False):
    """A prefix's record is a sealed prefix and its copies. `owner` has last-copy duty; `refs`
    counts the sessions that stand on it (forks); `wanted`: units that are to hold a copy too, by
    somebody's wish.
    """

    tokens: int
    owner: RoutingUnit | None
    locations: tuple[Location, ...]
    refs: int
    last_access_s: float
    group: str
    wanted: tuple[RoutingUnit, ...]
    epoch: Epoch | None


class _FormerPrefix(msgspec.Struct, frozen=True, array_like=True, tag="p", gc=False):
    """A former prefix is its record as it was written before there were wishes: it is read, and
    written no more.
    """

    tokens: int
    owner: RoutingUnit | None
    locations: tuple[Location, ...]
    refs: int
    last_access_s: float
    group: str
    epoch: Epoch | None


class GroupRecord(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """A group's record is its members (prefix hash, how many sessions came to stand on it), most
    used first.
    """

    members: tuple[tuple[PrefixHash, int], ...]


Record: TypeAlias = HolderRecord | SessionRecord | PrefixRecord | GroupRecord


class Records(Protocol):
    """Records are where a decision reads. `get` may raise, to have what is missing fetched and the
    decision made anew.
    """

    def get(self, key: Key, /) -> Record | None:
        """Return the record under `key`; None when there is none."""
        ...


@lru_cache(UNITS_CACHED)
def holder_key(worker: WorkerId, dp_rank: int) -> Key:
    """Return the key of the record of a unit's place in the fleet."""
    return Key(b"w:%b/%d" % (worker.encode(), dp_rank))


def unit_key(unit: RoutingUnit) -> Key:
    """Return the key of the record of the unit's place, whichever life that tells of."""
    return holder_key(unit.worker, unit.dp_rank)


def session_key(session_id: SessionId) -> Key:
    """Return the key of the session's record."""
    return Key(b"s:" + session_id.encode())


def prefix_key(prefix_hash: PrefixHash) -> Key:
    """Return the key of the prefix's record."""
    return Key(b"p:" + prefix_hash)


def prefix_named(key: Key) -> PrefixHash:
    """Return the prefix hash that is in a prefix record's key."""
    return PrefixHash(key.removeprefix(b"p:"))


def group_key(group: str) -> Key:
    """Return the key of the group's record."""
    return Key(b"g:" + group.encode())


def holder_of(records: Records, unit: RoutingUnit) -> HolderRecord | None:
    """Return the record of the unit's place in the fleet, whichever life it tells of."""
    return holder_at(records, holder_key(unit.worker, unit.dp_rank))


def holder_at(records: Records, key: Key) -> HolderRecord | None:
    """Return the holder under `key`, for who writes it too and needs the key anyway."""
    found = records.get(key)
    assert found is None or isinstance(found, HolderRecord)
    return found


def session_of(records: Records, session_id: SessionId) -> SessionRecord | None:
    """Return the session's record; None when it is not known."""
    return session_at(records, session_key(session_id))


def session_at(records: Records, key: Key) -> SessionRecord | None:
    """Return the session under `key`, for who writes it too and needs the key anyway."""
    found = records.get(key)
    assert found is None or isinstance(found, SessionRecord)
    return found


def prefix_of(records: Records, prefix_hash: PrefixHash) -> PrefixRecord | None:
    """Return the prefix's record; None when it is not known."""
    return prefix_at(records, prefix_key(prefix_hash))


def prefix_at(records: Records, key: Key) -> PrefixRecord | None:
    """Return the prefix under `key`, for who writes it too and needs the key anyway."""
    found = records.get(key)
    assert found is None or isinstance(found, PrefixRecord)
    return found


def group_of(records: Records, group: str) -> GroupRecord | None:
    """Return the group's record; None when it is not known."""
    found = records.get(group_key(group))
    assert found is None or isinstance(found, GroupRecord)
    return found


def with_location(places: Sequence[Location], new: Location) -> tuple[Location, ...]:
    """Return the copies `places` with `new` merged in. Copies of a former life of the same unit are
    dropped: they are gone.
    """
    kept = []
    for place in places:
        if place.unit is not None and new.unit is not None and _same_place(place.unit, new.unit):
            if place.unit.incarnation < new.unit.incarnation:
                continue
            if place.unit == new.unit and place.tier == new.tier:
                new = Location(new.unit, new.tier, place.kinds | new.kinds)
                continue
        elif place.unit is None and new.unit is None:
            new = Location(None, TierCode.REMOTE, place.kinds | new.kinds)
            continue
        kept.append(place)
    return (*kept, new)


def without_location(
    places: Sequence[Location], unit: RoutingUnit | None, tier: TierCode
) -> tuple[Location, ...]:
    """Return the copies `places` without that of `unit` (None: the shared one) in `tier`."""
    return tuple(place for place in places if place.unit != unit or place.tier is not tier)


def still_wanted(wanted: tuple[RoutingUnit, ...], place: Location) -> tuple[RoutingUnit, ...]:
    """Return the wishes of `wanted` that are left once `place` is a copy."""
    unit = place.unit
    if not wanted or unit is None:
        return wanted
    return tuple(one for one in wanted if not _same_place(one, unit))


def _same_place(one: RoutingUnit, other: RoutingUnit) -> bool:
    return one.worker == other.worker and one.dp_rank == other.dp_rank


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record | _FormerPrefix] = msgspec.msgpack.Decoder(
    Record | _FormerPrefix
)
encode_record = _encoder.encode


def decode_record(data: bytes) -> Record:
    """Return the record that `data` encodes, also where the version before this has written it."""
    found = _decoder.decode(data)
    if isinstance(found, _FormerPrefix):
        return PrefixRecord(
            found.tokens, found.owner, found.locations, found.refs, found.last_access_s,
            found.group, (), found.epoch,
        )  # fmt: skip
    return found
