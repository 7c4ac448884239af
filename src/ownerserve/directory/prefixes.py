"""Decisions on sealed prefixes: one last-copy duty, many read-only copies.

UNKNOWN --ClaimOwner--> OWNED --Release, or its owner's last copy dropped--> UNOWNED
UNKNOWN --Publish | ReplicateReadonly--> UNOWNED --ClaimOwner--> OWNED
OWNED   --owner's lease runs out, or its next life registers--> ORPHAN --ClaimOwner--> OWNED
any     --no copy and no fork left--> UNKNOWN
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ownerserve.directory import checks
from ownerserve.directory.decision import Decision, Draft, Moment, refuse, refuse_until_open
from ownerserve.directory.extents import live_copies, touch, use_in_group, without_copy
from ownerserve.directory.messages import (
    Advance,
    ClaimOwner,
    Drop,
    Dropped,
    FindGroup,
    Found,
    Granted,
    GroupIs,
    HeldBy,
    Lookup,
    Miss,
    Refusal,
    Release,
    Released,
    Replicated,
    ReplicateReadonly,
)
from ownerserve.directory.records import (
    Key,
    Location,
    Prefix,
    Records,
    group_of,
    holder_of,
    prefix_at,
    prefix_key,
    prefix_of,
    unit_key,
    with_location,
)
from ownerserve.directory.rules import Kind, Tier, may_replicate


def claim_owner(records: Records, ask: ClaimOwner, at: Moment) -> Decision:
    """First come, first served; later ones hold replicas."""
    why = checks.standing(holder_of(records, ask.unit), ask.unit, at.now_s)
    if why is not None:
        return refuse(why)
    if ask.kinds & TAIL:
        return refuse(Refusal.SESSION_LOCAL)
    place = Location(None if ask.tier is _REMOTE else ask.unit, ask.tier, ask.kinds)
    key = prefix_key(ask.prefix_hash)
    known = prefix_at(records, key)
    if known is None:
        fresh = Prefix(ask.tokens, ask.unit, (place,), 0, at.now_s, ask.group, at.epoch)
    else:
        is_ours = known.owner == ask.unit and known.epoch is not None
        fresh = Prefix(
            known.tokens,
            ask.unit,
            with_location(known.locations, place),
            known.refs,
            at.now_s,
            known.group or ask.group,
            known.epoch if is_ours else at.epoch,
        )
        if is_ours and known.epoch is not None:
            return Decision(Granted(known.epoch), ((key, fresh),))
    guards: tuple[Key, ...] = ()
    if known is not None and known.owner is not None and known.epoch is not None:
        holder = holder_of(records, known.owner)
        if holder is not None and checks.owner_lives(holder, known.owner, at.now_s):
            left_s = max(0.0, holder.lease_until_s - at.now_s)
            return Decision(HeldBy(known.owner, known.epoch, left_s))
        guards = (unit_key(known.owner),)
    if not checks.may_issue(at.now_s, at.open_at_s):
        return refuse_until_open(at)
    if not fresh.group:
        return Decision(Granted(at.epoch), ((key, fresh),), guards, minted=True)
    draft = Draft(records)
    draft.put(key, fresh)
    use_in_group(draft, fresh.group, ask.prefix_hash)
    return draft.granted(Granted(at.epoch), guards=guards)


class Tip(msgspec.Struct, frozen=True, gc=False):
    """A session's tip as its owner's report leaves it; `minted`: last-copy duty was taken on."""

    prefix: Prefix
    guards: tuple[Key, ...] = ()
    minted: bool = False


def claimed_tip(records: Records, ask: Advance, at: Moment) -> Tip:
    """The reporter's copy is noted in any case; the duty is its own where nobody alive has it."""
    place = Location(None if ask.tier is _REMOTE else ask.unit, ask.tier, ask.kinds)
    known = prefix_of(records, ask.prefix_hash)
    stands = checks.standing(holder_of(records, ask.unit), ask.unit, at.now_s) is None
    may_claim = stands and checks.may_issue(at.now_s, at.open_at_s)
    if known is None:
        owner, epoch = (ask.unit, at.epoch) if may_claim else (None, None)
        fresh = Prefix(ask.tokens, owner, (place,), 0, at.now_s, ask.group, epoch)
        return Tip(fresh, minted=may_claim)
    held = replace(
        known,
        locations=with_location(known.locations, place),
        last_access_s=at.now_s,
        group=known.group or ask.group,
    )
    owner = known.owner
    if owner is not None and checks.owner_lives(holder_of(records, owner), owner, at.now_s):
        return Tip(held)
    if not may_claim:
        return Tip(held)
    guards = () if owner is None else (unit_key(owner),)
    return Tip(replace(held, owner=ask.unit, epoch=at.epoch), guards, minted=True)


def release(records: Records, ask: Release, at: Moment) -> Decision:
    """The epoch stays in the record: an inventory from before must not bring the duty back."""
    prefix = prefix_of(records, ask.prefix_hash)
    if prefix is None:
        return refuse(Refusal.UNKNOWN_PREFIX)
    if not checks.owns_duty(prefix, ask.unit, ask.epoch):
        return refuse(Refusal.NOT_OWNER)
    draft = Draft(records)
    draft.put(prefix_key(ask.prefix_hash), replace(prefix, owner=None))
    return draft.decided(Released(len(live_copies(records, prefix, at.now_s))))


def replicate_readonly(records: Records, ask: ReplicateReadonly, at: Moment) -> Decision:
    """A copy for readers, where the owner rules allow one."""
    if not may_replicate(ask.kinds, ask.tier):
        return refuse(Refusal.SESSION_LOCAL)
    target = None if ask.tier is Tier.REMOTE else ask.target
    if target is not None:
        why = checks.standing(holder_of(records, target), target, at.now_s)
        if why is not None:
            return refuse(why)
    elif ask.tier is not Tier.REMOTE:
        return refuse(Refusal.UNKNOWN_HOLDER)
    prefix = prefix_of(records, ask.prefix_hash)
    if prefix is None:
        return refuse(Refusal.UNKNOWN_PREFIX)
    place = Location(target, ask.tier, ask.kinds)
    held = replace(prefix, locations=with_location(prefix.locations, place), last_access_s=at.now_s)
    draft = Draft(records)
    draft.put(prefix_key(ask.prefix_hash), held)
    return draft.decided(Replicated())


def drop(records: Records, ask: Drop, at: Moment) -> Decision:
    """Yes, unless a session would lose the last living copy of what it stands on."""
    prefix = prefix_of(records, ask.prefix_hash)
    if prefix is None:
        return Decision(Dropped())
    unit = None if ask.tier is Tier.REMOTE else ask.unit
    others = [
        place
        for place in live_copies(records, prefix, at.now_s)
        if place.unit != unit or place.tier is not ask.tier
    ]
    if not checks.may_drop(prefix, others):
        return refuse(Refusal.LAST_COPY)
    draft = Draft(records)
    draft.put(prefix_key(ask.prefix_hash), without_copy(prefix, ask.unit, ask.tier))
    return draft.decided(Dropped())


def lookup(records: Records, ask: Lookup, at: Moment) -> Decision:
    """Candidates are asked in the order given: pass the longest first."""
    for prefix_hash in ask.candidates:
        prefix = prefix_of(records, prefix_hash)
        if prefix is None:
            continue
        copies = live_copies(records, prefix, at.now_s)
        held = 0
        for place in copies:
            held |= place.kinds
        if not copies or ask.kinds & ~held:
            continue
        copies.sort(key=_nearest)
        draft = Draft(records)
        touch(draft, prefix_hash, prefix, at.now_s)
        places = tuple((place.unit, place.tier, place.kinds) for place in copies)
        owner = prefix.owner
        if owner is not None and not checks.owner_lives(holder_of(records, owner), owner, at.now_s):
            owner = None
        found = Found(
            prefix_hash,
            prefix.tokens,
            owner,
            prefix.epoch,
            places,
            prefix.refs,
            prefix.last_access_s,
            prefix.group,
        )
        return draft.decided(found)
    return Decision(Miss())


def find_group(records: Records, ask: FindGroup, _at: Moment) -> Decision:
    """An unknown group has no members."""
    group = group_of(records, ask.group)
    return Decision(GroupIs(group.members if group is not None else ()))


def _nearest(place: Location) -> int:
    return place.tier


# Looked up once: a member of an enum takes longer to find than a decision's other steps, and bits
# of a flag longer to compare than plain ones.
TAIL = int(Kind.TAIL)
_REMOTE = Tier.REMOTE
