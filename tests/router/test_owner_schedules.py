"""Seeded schedules of gateways under faults: no wish is lost, all agree once all is well.

Two hundred in CI. Any range by hand:

    python tests/router/test_owner_schedules.py LOW HIGH

`MUTATIONS` takes one check or step out of `Owners` at a time; each is missed by some schedule. Not
in the list, because something else backs it up and no schedule of a thousand can tell (scenarios in
test_owners.py can): that an earlier epoch is not followed (turns are told when they are answered:
by then a gateway has mostly heard of the lost memory), that a target without a lease is waited for
(its registration goes before the move, in the same batch), that a dead worker's refusal voids no
grants (they are looked at again), that what conflicted is asked again at once (the next renewal
asks it), and `SESSIONS_MAX`. Nor that a report moves no session: here it comes at once after its
own turn's word of where it runs, so that schedule 1,848 is the first to miss the check; three
scenarios do, `test_a_report_of_an_earlier_turn_does_not_move_the_session_back` first of all.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from owner_schedules import World, play

from ownerserve.directory import messages as ask
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway import owners
from ownerserve.router.gateway.leases import Leases
from ownerserve.router.gateway.owners import Grant, Owners

SCHEDULES = 200
CAUGHT_WITHIN = 1000


@pytest.mark.parametrize("first", range(0, SCHEDULES, 50))
def test_owner_schedules(first: int) -> None:
    for seed in range(first, first + 50):
        play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    for seed in (7, 8):
        assert play(seed).trace == play(seed).trace


def test_schedules_are_no_idle_talk() -> None:
    counts = sum((play(seed).counts for seed in range(30)), Counter[str]())
    for what, least in {
        "Transfer: bound": 50,
        "Transfer: conflict": 10,
        "Advance: conflict": 20,
        "Bind: heldby": 20,
        "Bind: rebuilding": 50,
        "RenewLease: unknown_holder": 10,
        "FindSession: sessionis": 50,
        "EndSession: ended": 30,
        "amnesias, term file kept": 5,
        "amnesias, term file lost": 5,
        "terms raised": 1,
        "batches lost": 20,
        "answers lost": 10,
        "batches broken off": 5,
        "look-ups given up": 20,
        "turns": 1000,
        "turns of forks": 100,
        "ends": 50,
        "kills": 10,
        "silences": 10,
        "zombies": 5,
        "gateways killed": 5,
        "gateways paused": 5,
    }.items():
        assert counts[what] >= least, what


class Mutation(NamedTuple):
    """What stands in the place of one check or step of `where`."""

    name: str
    where: Any
    attribute: str
    by: Any


def nothing(*_: object) -> None:
    return None


def yes(*_: object) -> bool:
    return True


def any_life(self: Leases, unit: RoutingUnit) -> None:
    known = self._lives.get((unit.worker, unit.dp_rank))
    if known != unit:
        if known is not None:
            self._to_register.pop(known, None)
        self._lives[unit.worker, unit.dp_rank] = unit
        self._to_register[unit] = 0.0


def runs_at_with(
    change: Callable[[Owners, SessionId, RoutingUnit], None], *, hears: bool = True
) -> Callable[..., None]:
    original = Owners.runs_at

    def runs_at(
        self: Owners, session: SessionId, unit: RoutingUnit, *, parent: SessionId | None = None
    ) -> None:
        if not hears:
            self.__dict__["lives"] = nothing
        original(self, session, unit, parent=parent)
        self.__dict__.pop("lives", None)
        change(self, session, unit)

    return runs_at


def is_sure(self: Owners, session: SessionId, _unit: RoutingUnit) -> None:
    """Where it was is where it is: nobody is asked."""
    if session in self._wishes and session not in self._fresh:
        del self._wishes[session]


def not_hurried(self: Owners, session: SessionId, unit: RoutingUnit) -> None:
    """A turn back where the session was leaves an older wish for elsewhere as it is."""
    grant, asked = self.grants.get(session), self._asked.get(session)
    if grant is not None and grant.unit == unit and asked is not None:
        self._wishes[session] = asked


def ends_what_is_granted(self: Owners, session: SessionId) -> None:
    if session in self.grants:
        self._wish(session, owners._END)


def keeps_the_first(
    self: Owners, session: SessionId, unit: RoutingUnit, epoch: Any, *, version: int
) -> None:
    self.grants.setdefault(session, Grant(unit, epoch, version, self._memory))


def without_version(
    self: Owners, session: SessionId, unit: RoutingUnit, epoch: Any, *, version: int
) -> None:
    self.grants[session] = Grant(unit, epoch, 0, self._memory)


def ignores(self: Owners, request: Any, _outcome: Any) -> None:
    self._settle(request.session_id)


def taking(request: type, outcome: type, by: Any) -> dict[type, dict[type, Any]]:
    """The table of answers, with one line changed."""
    table = {kind: dict(lines) for kind, lines in owners._TAKES.items()}
    table[request][outcome] = by
    return table


def not_yet(*without: ask.Refusal) -> tuple[ask.Refusal, ...]:
    return tuple(reason for reason in owners._NOT_YET if reason not in without)


R = ask.Refusal
MUTATIONS = (
    Mutation("nothing is put off", owners, "_NOT_YET", ()),
    Mutation(
        "a rebuilding directory is not asked again", owners, "_NOT_YET", not_yet(R.REBUILDING)
    ),
    Mutation("who is not reached is not asked again", owners, "_NOT_YET", not_yet(R.UNREACHABLE)),
    Mutation("forgotten, nobody registers", Owners, "_forgotten", nothing),
    Mutation("an older life is taken", Leases, "lives", any_life),
    Mutation("a turn tells of no life", Owners, "runs_at", runs_at_with(nothing, hears=False)),
    Mutation("a turn at home asks nobody", Owners, "runs_at", runs_at_with(is_sure)),
    Mutation("a turn back home leaves older wishes", Owners, "runs_at", runs_at_with(not_hurried)),
    Mutation("silent workers are renewed", Owners, "silent", nothing),
    Mutation("who is not there gets sessions", Leases, "sees", yes),
    Mutation("only what is granted ends", Owners, "ends", ends_what_is_granted),
    Mutation(
        "a conflict is ignored", owners, "_TAKES", taking(ask.Transfer, ask.Conflict, ignores)
    ),
    Mutation("a late report too", owners, "_TAKES", taking(ask.Advance, ask.Conflict, ignores)),
    Mutation(
        "who came first is not looked at", owners, "_TAKES", taking(ask.Bind, ask.HeldBy, ignores)
    ),
    Mutation("an unknown session stays so", Owners, "_unknown", Owners._settle),
    Mutation("what was seen is not carried", owners, "later", nothing),
    Mutation("later epochs are not kept", Owners, "_keep", keeps_the_first),
    Mutation("a transfer without version", Owners, "_keep", without_version),
    Mutation("the router hears all", Owners, "_is_news", yes),
    Mutation("nothing is settled", Owners, "_settle", nothing),
)


def first_caught(mutation: Mutation, seeds: int) -> str | None:
    """The first schedule that misses what was taken out, and how; None when none does."""
    with ExitStack() as patched:
        patched.enter_context(patch.object(mutation.where, mutation.attribute, mutation.by))
        for seed in range(seeds):
            try:
                play(seed)
            except (AssertionError, OwnerServeError, LookupError) as error:
                return f"schedule {seed}: {error}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_missing_check_is_noticed(mutation: Mutation) -> None:
    assert first_caught(mutation, CAUGHT_WITHIN) is not None


def main(words: Sequence[str]) -> int:
    """The command; 1 when anything was violated."""
    parser = argparse.ArgumentParser(prog="test_owner_schedules.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("low", type=int, help="the first seed")
    parser.add_argument("high", type=int, help="the one after the last")
    found = parser.parse_args(words)
    if not 0 <= found.low < found.high:
        parser.error("use 0 <= LOW < HIGH")
    counts, digest, failures = Counter[str](), hashlib.blake2b(digest_size=8), 0
    began_s = time.process_time()
    for seed in range(found.low, found.high):
        try:
            world: World = play(seed)
        except (AssertionError, OwnerServeError, LookupError) as error:
            failures += 1
            print(f"schedule {seed}: {type(error).__name__}: {error}", flush=True)
            continue
        counts += world.counts
        digest.update(repr(world.trace).encode())
    cpu_s = time.process_time() - began_s
    print(
        f"{found.high - found.low:,} owner schedules, {counts['turns']:,} turns, {cpu_s:,.0f} s "
        f"CPU: {failures} violations; digest {digest.hexdigest()}\nin them: "
        + ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
