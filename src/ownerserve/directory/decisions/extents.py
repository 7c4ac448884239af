"""This module changes a prefix record: a copy goes, a fork stands on it or leaves it, it is
used.
"""

from __future__ import annotations

from msgspec.structs import replace

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.records import (
    GROUP_LIMIT,
    GroupRecord,
    Location,
    PrefixRecord,
    Records,
    group_key,
    group_of,
    holder_of,
    prefix_key,
    prefix_of,
    without_location,
)
from ownerserve.directory.decisions.transaction import TransactionDraft
from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import RoutingUnit


def live_copies(records: Records, prefix: PrefixRecord, now_s: float) -> list[Location]:
    """List the copies whose holders live, and those in the shared remote tier."""
    return [
        place
        for place in prefix.locations
        if place.unit is None
        or checks.copy_counts(holder_of(records, place.unit), place.unit, now_s)
    ]


def without_copy(prefix: PrefixRecord, unit: RoutingUnit, tier: TierCode) -> PrefixRecord | None:
    """Return the prefix without a copy; with its owner's last one the duty goes. None: nothing is
    left to know.
    """
    left = without_location(prefix.locations, None if tier is TierCode.REMOTE else unit, tier)
    if not left and prefix.refs == 0:
        return None
    keeps = prefix.owner != unit or any(place.unit == unit for place in left)
    return replace(prefix, locations=left, owner=prefix.owner if keeps else None)


def put_prefix(
    draft: TransactionDraft, prefix_hash: PrefixHash, prefix: PrefixRecord | None
) -> None:
    """Write a prefix's record, and have its group know it. None: delete the record, and have its
    group forget it."""
    before = prefix_of(draft, prefix_hash)
    draft.put(prefix_key(prefix_hash), prefix)
    if prefix is None:
        if before is not None and before.group:
            _leave_group(draft, before.group, prefix_hash)
    elif prefix.group and (before is None or not before.group):
        _use_in_group(draft, prefix.group, prefix_hash, prefix.refs)


def count_fork(
    draft: TransactionDraft, prefix_hash: PrefixHash | None, change: int
) -> PrefixHash | None:
    """Count that a session begins (+1) or ceases (-1) to stand on a prefix; returns the prefix,
    None when it isn't known.
    """
    prefix = prefix_of(draft, prefix_hash) if prefix_hash is not None else None
    if prefix_hash is None or prefix is None:
        return None
    put_prefix(draft, prefix_hash, _with_forks(prefix, change))
    if prefix.group and change > 0:
        _use_in_group(draft, prefix.group, prefix_hash, change)
    return prefix_hash


def _with_forks(prefix: PrefixRecord, change: int) -> PrefixRecord | None:
    """Return the prefix with `change` sessions more that stand on it. None: nothing is left to
    know.
    """
    refs = prefix.refs + change
    assert refs >= 0, "a fork is counted once"
    if not refs and not prefix.locations:
        return None
    return PrefixRecord(
        prefix.tokens, prefix.owner, prefix.locations, refs, prefix.last_access_s, prefix.group,
        prefix.wanted, prefix.epoch,
    )  # fmt: skip


def _use_in_group(draft: TransactionDraft, name: str, prefix_hash: PrefixHash, more: int) -> None:
    """Count `more` uses of a member; a new one displaces the least used when the group is full."""
    group = group_of(draft, name) or GroupRecord(())
    uses = dict(group.members)
    used = uses.pop(prefix_hash, 0) + more
    kept = sorted(uses.items(), key=_by_use)[: GROUP_LIMIT - 1]
    members = sorted([(prefix_hash, used), *kept], key=_by_use)
    draft.put(group_key(name), GroupRecord(tuple(members)))


def _leave_group(draft: TransactionDraft, name: str, prefix_hash: PrefixHash) -> None:
    group = group_of(draft, name)
    if group is None:
        return
    kept = tuple(member for member in group.members if member[0] != prefix_hash)
    if len(kept) < len(group.members):
        draft.put(group_key(name), GroupRecord(kept) if kept else None)


def _by_use(member: tuple[PrefixHash, int]) -> int:
    return -member[1]
