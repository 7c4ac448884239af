"""This module has every safety check of the directory's decisions, each a function of its own.

Apart from the rest so that tests can take one out and see that it is missed
(tests/support/directory/mutations.py); decisions call them through this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.directory.decisions.records import (
    HolderRecord,
    Location,
    PrefixRecord,
    SessionRecord,
)
from ownerserve.directory.messages import Advance, DirectoryRefusal, HeldSession
from ownerserve.kv.messages import Epoch, RoutingUnit, Term


def incarnation_advances(holder: HolderRecord | None, unit: RoutingUnit) -> bool:
    """Tell whether the unit is the same life as the holder or a later one: a late message of an old
    life does not register.
    """
    return holder is None or holder.incarnation <= unit.incarnation


def is_current(holder: HolderRecord, unit: RoutingUnit) -> bool:
    """Tell whether the unit is the registered life: only that may own, renew or publish."""
    return holder.incarnation == unit.incarnation


def lease_runs(holder: HolderRecord, now_s: float) -> bool:
    """Tell whether the lease runs: a lapsed one is not renewed, for what it covered may be
    another's since.
    """
    return now_s < holder.lease_until_s


def is_same_memory(holder: HolderRecord, memory: Term | None) -> bool:
    """Tell whether the lease to be renewed was given by the memory that knows what it covers."""
    return memory is None or holder.memory is None or holder.memory == memory


def owner_lives(holder: HolderRecord | None, unit: RoutingUnit, now_s: float) -> bool:
    """Tell whether the owner's lease runs: while it does, nobody takes what it owns."""
    return _lives(holder, unit, now_s)


def target_lives(holder: HolderRecord | None, unit: RoutingUnit, now_s: float) -> bool:
    """Tell whether the target lives: a session is not handed to one who is not there."""
    return _lives(holder, unit, now_s)


def copy_counts(holder: HolderRecord | None, unit: RoutingUnit, now_s: float) -> bool:
    """Tell whether the copy's holder lives: a copy is gone after a restart, or when its holder went
    silent.
    """
    return _lives(holder, unit, now_s)


def may_issue(now_s: float, open_at_s: float) -> bool:
    """Tell whether a new owner may be made: without memory not before every lease of the lost
    memory has run out.
    """
    return now_s >= open_at_s


def may_adopt(now_s: float, open_at_s: float) -> bool:
    """Tell whether the directory is without memory: only then it takes a worker's word for a
    session it does not know.
    """
    return now_s < open_at_s


def owns(session: SessionRecord, unit: RoutingUnit, epoch: Epoch) -> bool:
    """Tell whether the unit is the owner under the record's epoch: only that moves or ends a
    session.
    """
    return session.owner == unit and session.epoch == epoch


def is_news(session: SessionRecord, seen: Epoch | None) -> bool:
    """Tell whether the owner never heard of its grant: only such a one is told again; all else gets
    a new epoch.
    """
    return seen is None or session.epoch > seen


def version_matches(session: SessionRecord, version: int) -> bool:
    """Compare and set: tell whether the sender decided on the session's present state; else it
    decides again.
    """
    return session.version == version


def is_advance(session: SessionRecord, version: int) -> bool:
    """Tell whether the report has more turns than are known: one of fewer came late."""
    return version > session.version


def is_told_again(session: SessionRecord, ask: Advance) -> bool:
    """Tell whether the report was taken before: its answer got lost, and it is answered as it was
    the first time.
    """
    return session.version == ask.version and session.prefix_hash == ask.prefix_hash


def report_is_later(session: SessionRecord, reported: HeldSession) -> bool:
    """Tell whether the report has the later epoch: of two units that claim a session from before,
    that one has it.
    """
    return session.epoch < reported.epoch


def is_stood_on(prefix: PrefixRecord) -> bool:
    """Tell whether a session stands on the prefix: while one does, a copy that was left stays
    known.
    """
    return prefix.refs > 0


def may_drop(prefix: PrefixRecord, others: Sequence[Location]) -> bool:
    """Tell whether the copy may go: the last living one that a session stands on is spilled
    before.
    """
    return bool(others) or prefix.refs == 0


def is_behind(issued: Epoch, seen: Epoch | None) -> bool:
    """Tell whether someone saw a later epoch than we remember issuing: memory was lost without
    notice.
    """
    return seen is not None and seen > issued


def standing(
    holder: HolderRecord | None, unit: RoutingUnit, now_s: float
) -> DirectoryRefusal | None:
    """Return the reason why `unit` may not own anything now; None when it may."""
    if holder is None or holder.incarnation < unit.incarnation:
        # A former life may have come first to a directory that lost its memory.
        return DirectoryRefusal.UNKNOWN_HOLDER
    if not is_current(holder, unit):
        return DirectoryRefusal.STALE_INCARNATION
    if not lease_runs(holder, now_s):
        return DirectoryRefusal.LEASE_LAPSED
    return None


def _lives(holder: HolderRecord | None, unit: RoutingUnit, now_s: float) -> bool:
    if holder is None:
        return False
    return holder.incarnation == unit.incarnation and now_s < holder.lease_until_s
