"""Each safety check, taken out: what stands there instead when it is missing.

python -m tests.support.directory.mutations [SEEDS]     which seed first misses each check

Not in the list is `is_same_memory`, the check that schedule 141 once asked for: since owners ask as
soon as they are told to, no schedule of 4,000 is slow enough to need it. The contract suite notices
it (`test_a_memory_that_knows_a_unit_by_a_late_message_renews_nothing`).

Nor is `version_matches`: an owner hands over what it has advanced itself, so that only who is no
owner names another version (`test_transfer_is_compare_and_set`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ownerserve.cache.ingest import Ingest
from ownerserve.directory.decisions import checks
from ownerserve.directory.messages import Outcome
from ownerserve.directory.owner.doors import Doors, GuardedOwner, RecentSessions
from ownerserve.directory.owner.state import Ask, OwnerState
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit, Term
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.node.ownership.publishing import Publishing
from ownerserve.node.restore import sources
from ownerserve.node.restore.restores import PendingRestore, RestorePhase, Restores
from ownerserve.node.restore.sources import OwnDevice
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import Cell
from ownerserve.router import fleet, knowledge
from ownerserve.router.fleet import Candidates, Fleet
from ownerserve.router.worker import Worker
from tests.support.directory import fault_world
from tests.support.directory.fault_world import World, play
from tests.support.removals import Instead, Schedules, no, nothing, without, yes


def from_receipt(owner: OwnerState, _ask: Ask, lease_s: float, now_s: float) -> float:
    return now_s + lease_s


def any_life(known: Fleet, unit: RoutingUnit) -> Worker | None:
    return known._workers.get((unit.worker, unit.dp_rank))


def every_answer(owner: OwnerState, number: int) -> Ask | None:
    """Answers to attempts that were given up count too."""
    owner._asks.pop(number, None)
    known: dict[int, Ask] = owner.__dict__.setdefault("_ever_asked", {})
    return known.get(number)


def remembered(original: Callable[..., Ask]) -> Callable[..., Ask]:
    def ask(owner: OwnerState, request: Any, now_s: float) -> Ask:
        one = original(owner, request, now_s)
        owner.__dict__.setdefault("_ever_asked", {})[one.number] = one
        return one

    return ask


def still_served(owner: OwnerState) -> None:
    until_s = owner._lease_until_s
    owner._carried.update({name: (one, until_s) for name, one in owner.grants.items()})


def same_term(_world: World, above: Term | None) -> Term:
    """A directory that lost its memory goes on as if it were the first."""
    return Term(above.ordinal + 1 if above else 1, 1)


def never_due(*_: object, **_named: object) -> list[object]:
    return []


def any_answer(restores: Restores, operation_id: int, *_: RestorePhase) -> PendingRestore | None:
    """Also one that came twice, or for what was done since."""
    return restores._by_operation.get(operation_id)


def session_goes_on(
    chains: Chains,
    tokens: Packed,
    session_id: SessionId | None,
    made: HashedPrefix | None = None,
) -> HashedPrefix:
    """Without a look whether the prompt begins with what the session had before."""
    known = chains._known.get(session_id) if session_id is not None else None
    if known is None:
        return hashed(chains, tokens, session_id, made)
    count = len(known.tokens)
    known.grow(known.tokens + tokens[count:])
    return known


def taken_unheard(publishing: Publishing, _outcome: Outcome) -> None:
    """Whatever the directory answers, or if it does not."""
    publishing._under_way = None


def parts_of_sets(
    names: Any, asked: Any, found: Any, *, without: Any = frozenset()
) -> sources.StoredRecords:
    """Cells of which one component is there count as if all were."""
    whole = held(names, asked, found, without=without)
    ranges: dict[Any, dict[str, sources.StoredRecord]] = {}
    for id_, tier in found.items():
        what = asked.get(id_)
        if what is None or id_ in without or what.lead is not None or what.first == what.end:
            continue
        is_named = what.first is not None
        cell = Cell(what.first, what.end) if is_named else names.cell_ending_at(what.end)
        ranges.setdefault(cell, {})[what.component] = sources.StoredRecord(id_, tier)
    longest = {cell.first: cell for cell in sorted(ranges, key=lambda cell: cell.end)}
    cells = tuple((cell, ranges[cell]) for _, cell in sorted(longest.items()))
    return sources.StoredRecords(cells, whole.points)


def unasked(*_: Any) -> bool:
    """What comes in counts, whether or not it covers what was reserved."""
    return True


hashed, held = Chains.hashed, sources.stored_records


REMOVALS = (
    without(Instead(checks, "incarnation_advances", yes)),
    without(Instead(checks, "is_current", yes)),
    without(Instead(checks, "owner_lives", no)),
    without(Instead(checks, "copy_counts", yes)),
    without(Instead(checks, "may_issue", yes)),
    without(Instead(checks, "may_adopt", yes)),
    without(Instead(checks, "owns", yes)),
    without(Instead(checks, "is_news", yes)),
    without(Instead(checks, "is_advance", yes)),
    without(Instead(checks, "may_drop", yes)),
    without(Instead(checks, "is_behind", no)),
    without(Instead(OwnerState, "_lease_covers", yes)),
    without(Instead(OwnerState, "_lease_end", from_receipt)),
    without(Instead(OwnerState, "_stop_serving", nothing)),
    without(Instead(OwnerState, "_take", every_answer)),
    without(Instead(OwnerState, "_carry", still_served)),
    # A lapsed owner forgets by itself, and is refused by the directory when it does not.
    without(
        Instead(OwnerState, "_void_if_over", nothing),
        Instead(OwnerState, "_is_still_ours", yes),
        Instead(checks, "lease_runs", yes),
    ),
    # Nobody reports what it may not claim; if someone did, the later epoch would have it.
    without(
        Instead(checks, "report_is_later", yes),
        Instead(OwnerState, "_is_still_ours", yes),
        Instead(OwnerState, "_void_if_over", nothing),
    ),
    without(Instead(checks, "target_lives", yes)),
    # The router's
    without(Instead(fleet, "_is_former_life", no)),
    without(Instead(knowledge, "_is_earlier", no)),
    without(Instead(Fleet, "find", any_life)),
    without(Instead(Candidates, "without", lambda candidates, tried: candidates)),
    without(Instead(Worker, "take", nothing)),
    # The door's
    without(Instead(Doors, "above", nothing)),
    without(Instead(Doors, "hear", nothing)),
    without(Instead(GuardedOwner, "_is_stale", no)),
    without(Instead(GuardedOwner, "_void_below", no)),
    without(Instead(RecentSessions, "due", never_due)),
    without(Instead(fault_world.World, "new_term", same_term)),
    # The node's
    without(Instead(Restores, "overdue", never_due)),
    without(Instead(Restores, "gone", never_due)),
    without(Instead(Restores, "_give_up_slots", nothing)),
    without(Instead(Restores, "_answered", any_answer), Instead(Operations, "end", nothing)),
    without(Instead(Chains, "hashed", session_goes_on)),
    without(Instead(OwnDevice, "quiet", nothing)),
    # Two locks: what planning lets through as whole, commit refuses as not covered. By itself the
    # first is tools/mutants' cell-of-which-a-part-is-there.
    without(
        Instead(sources, "stored_records", parts_of_sets),
        Instead(Ingest, "_is_verified", unasked),
    ),
    without(Instead(Publishing, "forgotten", nothing)),
    without(Instead(Publishing, "answered", taken_unheard)),
)


LATE = {"may_adopt": 271, "owns": 134, "_lease_end": 254, "_carry": 105}
"""Removals that the first hundreds of schedules do not miss, and a schedule that did."""

SCHEDULES = Schedules(
    play, LATE, beside=(Instead(OwnerState, "_ask", remembered(OwnerState._ask)),)
)

if __name__ == "__main__":
    SCHEDULES.tell(REMOVALS, otherwise=1000)
