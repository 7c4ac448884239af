"""These decisions are on routing units: register, renew, retire, and what they publish of
themselves.

(unknown) --Register--> LIVE --lease runs out--> LAPSED --Register--> LIVE
                        LIVE --Register(later life)--> LIVE; the former life owns nothing
                        LIVE --Retire--> LAPSED at once
"""

from __future__ import annotations

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.extents import count_fork, live_copies, put_prefix, without_copy
from ownerserve.directory.decisions.records import (
    HolderRecord,
    Key,
    Location,
    PrefixRecord,
    Records,
    SessionRecord,
    holder_at,
    holder_of,
    prefix_at,
    prefix_key,
    prefix_of,
    session_key,
    session_of,
    still_wanted,
    unit_key,
    with_location,
)
from ownerserve.directory.decisions.transaction import Moment, Transaction, TransactionDraft, refuse
from ownerserve.directory.messages import (
    DirectoryRefusal,
    HeldExtent,
    HeldSession,
    Leased,
    Publish,
    Published,
    Register,
    RenewLease,
    Retire,
    Retired,
)
from ownerserve.directory.rules import Kinds, StateKind, TierCode
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import RoutingUnit, Term


def register(records: Records, ask: Register, at: Moment) -> Transaction:
    """Write down a new life of a unit, which makes all claims and copies of the former one void;
    refuse an older one.
    """
    key = unit_key(ask.unit)
    holder = holder_at(records, key)
    if not checks.incarnation_advances(holder, ask.unit):
        return refuse(DirectoryRefusal.STALE_INCARNATION)
    if holder is not None and holder.incarnation == ask.unit.incarnation:
        return _leased(key, ask.unit, at, holder.memory)
    return _leased(key, ask.unit, at, at.epoch.term)


def renew_lease(records: Records, ask: RenewLease, at: Moment) -> Transaction:
    """Extend a running lease; a lapsed one is not revived."""
    key = unit_key(ask.unit)
    holder = holder_at(records, key)
    why = checks.standing(holder, ask.unit, at.now_s)
    if why is not None:
        return refuse(why)
    assert holder is not None
    if not checks.is_same_memory(holder, ask.memory):
        return refuse(DirectoryRefusal.UNKNOWN_HOLDER)
    return _leased(key, ask.unit, at, holder.memory)


def retire(records: Records, ask: Retire, at: Moment) -> Transaction:
    """End the life's lease now. The record stays, so that the life's late messages are known for
    what they are.
    """
    holder = holder_of(records, ask.unit)
    if holder is None or not checks.is_current(holder, ask.unit):
        return Transaction(Retired())
    ended = HolderRecord(holder.incarnation, min(holder.lease_until_s, at.now_s), holder.memory)
    return Transaction(Retired(), ((unit_key(ask.unit), ended),))


def publish(records: Records, ask: Publish, at: Moment) -> Transaction:
    """Take over a part of a unit's inventory. Repeating it changes nothing."""
    why = checks.standing(holder_of(records, ask.unit), ask.unit, at.now_s)
    if why is not None:
        return refuse(why)
    tail = int(StateKind.TAIL)
    if any(extent.kinds & tail for extent in ask.extents):
        return refuse(DirectoryRefusal.SESSION_LOCAL)
    draft = TransactionDraft(records)
    places = _Places(ask.unit)
    for extent in ask.extents:
        key = prefix_key(extent.prefix_hash)
        fresh = _with_extent(prefix_at(draft, key), extent, places, at)
        if fresh.group:
            put_prefix(draft, extent.prefix_hash, fresh)
        else:
            draft.put(key, fresh)
    lost = tuple(one for one, tier in ask.gone if _forget(draft, ask.unit, one, tier, at=at))
    forked = tuple(copy for copy in ask.left if _leave(draft, ask.unit, *copy))
    adopted = tuple(one.session_id for one in ask.sessions if _adopt(draft, ask.unit, one, at))
    return draft.decided(Published(adopted, forked, lost))


def _leased(key: Key, unit: RoutingUnit, at: Moment, memory: Term | None) -> Transaction:
    record = HolderRecord(unit.incarnation, at.now_s + at.lease_s, memory)
    return Transaction(Leased(at.lease_s, memory), ((key, record),))


class _Places:
    """_Places has one `Location` tuple for each (tier, kinds) of a unit: a million extents share a
    few.
    """

    __slots__ = ("_known", "unit")

    def __init__(self, unit: RoutingUnit) -> None:
        self.unit = unit
        self._known: dict[tuple[int, int], tuple[Location]] = {}

    def only(self, tier: TierCode, kinds: Kinds) -> tuple[Location]:
        key = (tier, kinds)
        found = self._known.get(key)
        if found is None:
            unit = None if tier is TierCode.REMOTE else self.unit
            found = self._known[key] = (Location(unit, tier, kinds),)
        return found


def _with_extent(
    known: PrefixRecord | None, extent: HeldExtent, places: _Places, at: Moment
) -> PrefixRecord:
    alone = places.only(extent.tier, extent.kinds)
    owner = places.unit if extent.epoch is not None else None
    if known is None:
        return PrefixRecord(
            extent.tokens, owner, alone, 0, at.now_s, extent.group, (), extent.epoch
        )
    locations = with_location(known.locations, alone[0])
    epoch = known.epoch
    if extent.epoch is None or (epoch is not None and extent.epoch <= epoch):
        owner = known.owner
    else:
        epoch = extent.epoch
    group = known.group or extent.group
    wanted = still_wanted(known.wanted, alone[0])
    return PrefixRecord(
        known.tokens, owner, locations, known.refs, known.last_access_s, group, wanted, epoch
    )


def _forget(
    draft: TransactionDraft,
    unit: RoutingUnit,
    prefix_hash: PrefixHash,
    tier: TierCode,
    *,
    at: Moment,
) -> bool:
    """Take the copy out of its record. Returns True when it was the last living one of what a
    session stands on.
    """
    held = prefix_of(draft, prefix_hash)
    if held is None:
        return False
    left = without_copy(held, unit, tier)
    if left is not None and len(left.locations) == len(held.locations):
        return False
    put_prefix(draft, prefix_hash, left)
    return left is not None and left.refs > 0 and not live_copies(draft, left, at.now_s)


def _leave(
    draft: TransactionDraft, unit: RoutingUnit, prefix_hash: PrefixHash, tier: TierCode
) -> bool:
    """Take out the copy, which a longer extent holds as well. Returns True when it stays known, for
    a session stands on it.
    """
    held = prefix_of(draft, prefix_hash)
    if held is None:
        return False
    if checks.is_stood_on(held):
        return True
    put_prefix(draft, prefix_hash, without_copy(held, unit, tier))
    return False


def _adopt(draft: TransactionDraft, unit: RoutingUnit, reported: HeldSession, at: Moment) -> bool:
    """Tell whether the reported session is the reporter's. It is made so where the directory knows
    no later owner and is rebuilding.
    """
    session = session_of(draft, reported.session_id)
    if session is not None and checks.owns(session, unit, reported.epoch):
        return True
    if session is None and not checks.may_adopt(at.now_s, at.open_at_s):
        return False
    if session is not None and not checks.report_is_later(session, reported):
        return False
    if session is not None:
        count_fork(draft, session.prefix_hash, -1)
    _stand_on(draft, reported, at)
    taken = SessionRecord(
        unit, reported.version, reported.prefix_hash, reported.tokens, at.now_s, reported.epoch
    )
    draft.put(session_key(reported.session_id), taken)
    return True


def _stand_on(draft: TransactionDraft, reported: HeldSession, at: Moment) -> None:
    """Count the session among those that stand on its tip, whose copies may be told of after it."""
    tip = reported.prefix_hash
    if tip is not None and count_fork(draft, tip, +1) is None:
        draft.put(
            prefix_key(tip), PrefixRecord(reported.tokens, None, (), 1, at.now_s, "", (), None)
        )
