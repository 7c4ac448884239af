"""These decisions are on sealed prefixes: one last-copy duty, many read-only copies.

UNKNOWN --Advance--> OWNED --its owner's last copy goes--> UNOWNED
UNKNOWN --Publish--> UNOWNED --Advance--> OWNED
OWNED   --owner's lease runs out, or its next life registers--> ORPHAN --Advance--> OWNED
any     --no copy and no fork left--> UNKNOWN
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.extents import live_copies, put_prefix, without_copy
from ownerserve.directory.decisions.records import (
    WISH_LIMIT,
    Key,
    Location,
    PrefixRecord,
    Records,
    group_of,
    holder_at,
    holder_key,
    holder_of,
    prefix_of,
    still_wanted,
    unit_key,
    with_location,
)
from ownerserve.directory.decisions.transaction import Moment, Transaction, TransactionDraft, refuse
from ownerserve.directory.messages import (
    Advance,
    DirectoryRefusal,
    Drop,
    Dropped,
    FindGroup,
    Found,
    GroupIs,
    Lookup,
    Miss,
    ReplicateReadonly,
    Wished,
)
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.kv.messages import RoutingUnit


class ClaimedTip(msgspec.Struct, frozen=True, gc=False):
    """A claimed tip is a session's tip as its owner's report leaves it; `minted`: last-copy duty
    was taken on.
    """

    prefix: PrefixRecord
    guards: tuple[Key, ...] = ()
    minted: bool = False


def claimed_tip(records: Records, ask: Advance, at: Moment) -> ClaimedTip:
    """Return the tip's record with the reporter's copy, and with its last-copy duty where nobody
    alive has that.
    """
    place = Location(None if ask.tier is _REMOTE else ask.unit, ask.tier, ask.kinds)
    known = prefix_of(records, ask.prefix_hash)
    stands = checks.standing(holder_of(records, ask.unit), ask.unit, at.now_s) is None
    may_claim = stands and checks.may_issue(at.now_s, at.open_at_s)
    if known is None:
        owner, epoch = (ask.unit, at.epoch) if may_claim else (None, None)
        fresh = PrefixRecord(ask.tokens, owner, (place,), 0, at.now_s, ask.group, (), epoch)
        return ClaimedTip(fresh, minted=may_claim)
    held = replace(
        known,
        locations=with_location(known.locations, place),
        last_access_s=at.now_s,
        group=known.group or ask.group,
        wanted=still_wanted(known.wanted, place),
    )
    owner = known.owner
    if owner is not None and checks.owner_lives(holder_of(records, owner), owner, at.now_s):
        return ClaimedTip(held)
    if not may_claim:
        return ClaimedTip(held)
    guards = () if owner is None else (unit_key(owner),)
    return ClaimedTip(replace(held, owner=ask.unit, epoch=at.epoch), guards, minted=True)


def drop(records: Records, ask: Drop, at: Moment) -> Transaction:
    """Let a copy go, unless a session would lose the last living one of what it stands on."""
    prefix = prefix_of(records, ask.prefix_hash)
    if prefix is None:
        return Transaction(Dropped())
    unit = None if ask.tier is TierCode.REMOTE else ask.unit
    others = [
        place
        for place in live_copies(records, prefix, at.now_s)
        if place.unit != unit or place.tier is not ask.tier
    ]
    if not checks.may_drop(prefix, others):
        return refuse(DirectoryRefusal.LAST_COPY)
    draft = TransactionDraft(records)
    put_prefix(draft, ask.prefix_hash, without_copy(prefix, ask.unit, ask.tier))
    return draft.decided(Dropped())


def lookup(records: Records, ask: Lookup, at: Moment) -> Transaction:
    """Find the first candidate that is held, in the order given: the longest belongs first."""
    for prefix_hash in ask.candidates:
        prefix = prefix_of(records, prefix_hash)
        if prefix is None:
            continue
        copies = live_copies(records, prefix, at.now_s)
        if not copies:
            continue
        copies.sort(key=_nearest)
        places = tuple((place.unit, place.tier, place.kinds) for place in copies)
        owner = prefix.owner
        if owner is not None and not checks.owner_lives(holder_of(records, owner), owner, at.now_s):
            owner = None
        found = Found(
            prefix_hash,
            prefix.tokens,
            owner,
            places,
            prefix.refs,
            prefix.group,
            _live_wishes(records, prefix, at.now_s),
        )
        return Transaction(found)
    return Transaction(Miss())


def replicate_readonly(records: Records, ask: ReplicateReadonly, at: Moment) -> Transaction:
    """Write the wish down for the life that is at the place now, unless that has a copy."""
    prefix = prefix_of(records, ask.prefix_hash)
    if prefix is None:
        return refuse(DirectoryRefusal.UNKNOWN_PREFIX)
    key = holder_key(ask.worker, ask.dp_rank)
    holder = holder_at(records, key)
    if holder is None:
        return refuse(DirectoryRefusal.TARGET_NOT_LIVE)
    target = RoutingUnit(ask.worker, ask.dp_rank, holder.incarnation)
    if not checks.target_lives(holder, target, at.now_s):
        return refuse(DirectoryRefusal.TARGET_NOT_LIVE)
    others = tuple(one for one in _live_wishes(records, prefix, at.now_s) if one != target)
    if any(place.unit == target for place in prefix.locations):
        return Transaction(Wished(others))
    wanted = (*others, target)[-WISH_LIMIT:]
    draft = TransactionDraft(records)
    put_prefix(draft, ask.prefix_hash, replace(prefix, wanted=wanted))
    return draft.decided(Wished(wanted), guards=(key,))


def _live_wishes(records: Records, prefix: PrefixRecord, now_s: float) -> tuple[RoutingUnit, ...]:
    return tuple(
        one for one in prefix.wanted if checks.target_lives(holder_of(records, one), one, now_s)
    )


def find_group(records: Records, ask: FindGroup, _at: Moment) -> Transaction:
    """Say a group's members; an unknown group has none."""
    group = group_of(records, ask.group)
    return Transaction(GroupIs(group.members if group is not None else ()))


def _nearest(place: Location) -> int:
    return place.tier


# Looked up once: a member of an enum takes longer to find than a decision's other steps, and bits
# of a flag longer to compare than plain ones.
TAIL = int(StateKind.TAIL)
_REMOTE = TierCode.REMOTE
