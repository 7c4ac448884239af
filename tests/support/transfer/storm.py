"""Reads between real processes, cut off at random points: cancelled, late, revoked, their mover
closed, their peer killed or frozen. Whatever is written after a read's end is found.

A goal is full of poison from its read's end until it is reserved again, and looked at then; at the
end all of them are. Goals are an ArenaBook's, so a mover that can't be fenced passes too: what it
abandons is not used again before it is quiet. One that is closed amid, or whose peer was killed,
leaves some for ever; where that fills the goals there are new ones.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import msgspec

from ownerserve.kv.units import KIB, MIB
from ownerserve.transfer.movers.arena import Slot
from ownerserve.transfer.vocabulary import ReadLanded, ReadUnproven
from tests.support.transfer.lending import LendingProcess
from tests.support.transfer.reading import (
    LONG_S,
    Begun,
    Goals,
    Reader,
    open_files,
    own_threads,
    slices,
)
from tests.support.transfer.roads import RoadUnderTest
from tests.support.waits import until

POOL_BYTES = 16 * MIB
GOALS_BYTES = 32 * MIB
ABANDONED_BYTES = GOALS_BYTES // 3
"""With so much abandoned the goals are left for new ones: a trial finds room for its reads."""
SIZES = (4 * KIB, 64 * KIB, MIB, 3 * MIB)
SOON_S = 0.002
"""Points at which a read is cut off lie within this of its start."""
KINDS = {"none": 10, "cancel": 40, "deadline": 20, "reuse": 20, "close": 6, "freeze": 3, "kill": 1}


class Came(msgspec.Struct):
    """What came of a storm. `aborted` counts reads that were cut off, or meant to be; `late` bytes
    that were written after a read's end."""

    landed: int = 0
    counted: int = 0
    aborted: int = 0
    late: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    by: Counter[str] = msgspec.field(default_factory=Counter)


class _Storm:
    def __init__(self, road: RoadUnderTest, seed: int) -> None:
        self.road = road
        self.draw = random.Random(seed)
        self.goals = Goals(GOALS_BYTES)
        self.abandoned: dict[int, Slot] = {}
        self.came = Came()
        self.lending = LendingProcess(road, POOL_BYTES)
        self.reader = Reader(road, self.lending, goals=self.goals)
        self.number = 0

    def renew_reader(self) -> None:
        """Read by another mover; into new goals where much of the old ones is abandoned."""
        former = self.reader
        self.take_quiet()
        if self.much_is_abandoned:
            self.look_for_late()
            self.goals, self.abandoned = Goals(GOALS_BYTES), {}
        self.reader = Reader(self.road, self.lending, goals=self.goals)
        self.reader.skip_to(former.last_number)

    @property
    def much_is_abandoned(self) -> bool:
        return self.goals.book.numbers(0.0).abandoned_bytes > ABANDONED_BYTES

    def look_for_late(self) -> None:
        self.came.late += self.goals.late_beside(list(self.abandoned.values()))

    def wait(self) -> None:
        """Let a random part of SOON_S pass, at work: a sleep would be longer."""
        until_s = time.monotonic() + self.draw.random() * SOON_S
        while time.monotonic() < until_s:
            pass

    def trial(self) -> None:
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        self.came.by[kind] += 1
        begun = []
        for place in range(self.draw.randint(1, 3)):
            size = self.draw.choice(SIZES)
            run = self.draw.choice((size, 4096, 60_000, 100_000))
            runs = [(place * 4 * MIB + at, length) for at, length in slices(size, run)]
            self.draw.shuffle(runs)
            cuts = slices(size, self.draw.choice((size, 4096, 33_333)))
            soon_s = self.draw.random() * SOON_S if kind == "deadline" else LONG_S
            for_s = 0.05 if kind == "freeze" else soon_s
            one, read = self.reader.prepare(runs, cuts=cuts, for_s=for_s)
            begun.append((one, read))
        if kind == "freeze":
            self.lending.freeze()
        for _, read in begun:
            self.reader.mover.start(read)
        ones = [one for one, _ in begun]
        self.cut_off(kind, ones)
        self.settle(ones)
        self.after(kind)
        self.came.aborted += len(ones) if kind != "none" else 0

    def cut_off(self, kind: str, begun: list[Begun]) -> None:
        if kind in ("none", "deadline", "freeze"):
            return
        self.wait()
        match kind:
            case "cancel":
                for one in begun:
                    self.reader.mover.cancel(one.number)
            case "reuse":
                for one in begun:
                    self.lending.reuse(one.ticket)
            case "close":
                self.reader.close()
            case "kill":
                self.lending.kill()

    def settle(self, begun: list[Begun]) -> None:
        """Wait for the ends, look at what counts, and poison the goals at once."""
        for one in begun:
            end = self.reader.end_of(one.number)
            if isinstance(end, ReadUnproven):
                self.came.failed[f"unproven: {end.reason}"] += 1
                self.goals.book.abandon(one.number, 0.0)
                self.abandoned[one.number] = one.slot
                continue
            if isinstance(end, ReadLanded):
                self.came.landed += 1
                alive = self.came_counts(one)
                self.came.counted += alive
            else:
                self.came.failed[str(end.reason)] += 1
            self.goals.poison(one.slot)
            self.goals.book.give_back(one.number)
        self.take_quiet()

    def take_quiet(self) -> None:
        """Have what is quiet now be used again, full of poison."""
        for number in self.reader.quiet:
            self.goals.poison(self.abandoned.pop(number))
            self.goals.book.quiet(number)
        self.reader.quiet.clear()

    def came_counts(self, one: Begun) -> bool:
        """Whether a read that landed counts; its bytes are right then."""
        if not self.lending.answers:
            return False
        counts = self.reader.counts(one, signed=self.road.kind.is_signed)
        assert not counts or self.reader.is_right(one), "wrong bytes count"
        return counts

    def after(self, kind: str) -> None:
        if kind == "freeze":
            self.lending.thaw()
        if kind == "kill":
            self.reader.close()
            self.lending.close()
            self.lending = LendingProcess(self.road, POOL_BYTES)
        is_closed = kind in ("kill", "close")
        if not is_closed and self.much_is_abandoned:
            self.reader.close()
            is_closed = True
        if is_closed:
            self.renew_reader()

    def close(self) -> None:
        self.reader.close()
        self.lending.close()
        self.take_quiet()
        numbers = self.goals.book.numbers(0.0)
        self.goals.book.check()
        assert not numbers.reserved_bytes
        assert not numbers.abandoned_bytes or not self.road.kind.is_fenced
        self.look_for_late()


def storm(road: RoadUnderTest, *, trials: int, seed: int) -> Came:
    """Make that many trials, of one to three reads each; raises AssertionError for wrong bytes that
    count, late bytes, and whatever is left behind."""
    LendingProcess(road, POOL_BYTES).close()  # what is started once is
    files, threads = open_files(), own_threads()
    under_way = _Storm(road, seed)
    for _ in range(trials):
        under_way.trial()
    under_way.close()
    if road.kind.is_fenced:  # an engine's threads and sockets are its own, and end with it
        until(lambda: own_threads() <= threads, what="the end of all threads")
        assert open_files() == files, "a descriptor is left"
    return under_way.came
