"""The contract that every mover keeps, hazards first. A road passes it by a class of its own:

    class TestReadv(MoverContract):
        road = READV

Between real processes. `counts` is what the rest of the system goes by: a read that landed, and
whose ticket stood after it (the mover says so, or the asker's `More`). A mover that can't be fenced
may end a read unproven in place of failed, and write to its goal, nowhere else, until it is quiet.
"""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from ownerserve.kv.units import KIB, MIB
from ownerserve.transfer.movers.digests import KeyedBlake3
from ownerserve.transfer.vocabulary import (
    Ended,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadUnproven,
    Runs,
)
from tests.support.transfer.lending import LendingProcess
from tests.support.transfer.reading import (
    Begun,
    Goals,
    Reader,
    open_files,
    own_threads,
    python_threads,
    runs_of,
    slices,
)
from tests.support.transfer.roads import RoadUnderTest
from tests.support.transfer.storm import storm
from tests.support.waits import until

POOL_BYTES = 40 * MIB
BIG = [(0, 32 * MIB)]
"""Long enough that something can happen while it is read."""


def scattered(count: int, length: int, *, seed: int, gap: int = 0) -> list[tuple[int, int]]:
    """`count` runs of that length, in any order, with gaps between."""
    at = list(range(0, count * (length + gap), length + gap))
    random.Random(seed).shuffle(at)
    return [(offset, length) for offset in at]


SHAPES = {
    "in one piece": ([(64, 3 * MIB + 5)], [(0, 3 * MIB + 5)]),
    "scattered blocks": (scattered(40, 64 * KIB, seed=1, gap=4096), slices(40 * 64 * KIB, MIB)),
    "many small runs": (scattered(4096, 512, seed=2, gap=512), scattered(4096, 512, seed=3)),
    "cut otherwise": (scattered(9, 99_991, seed=4, gap=7), slices(9 * 99_991, 31_337)),
    "empty runs": ([(0, 0), (100, 5000), (9, 0), (7000, 3)], [(0, 4000), (9, 0), (4000, 1003)]),
    "nothing": ([], []),
    "one empty run": ([(4096, 0)], [(0, 0)]),
}  # fmt: skip


class MoverContract:
    """What holds of every mover. `road` is set by the class of a road."""

    road: ClassVar[RoadUnderTest]
    forged_is: ClassVar[ReadFailure] = ReadFailure.REFUSED
    """What a read of an address that nobody lends ends as."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_lending(cls) -> Iterator[LendingProcess]:
        lending = LendingProcess(cls.road, POOL_BYTES)
        yield lending
        lending.close()

    @pytest.fixture
    def reader(self, shared_lending: LendingProcess) -> Iterator[Reader]:
        reader = Reader(self.road, shared_lending, goals=Goals(48 * MIB))
        yield reader
        reader.close()

    @pytest.fixture
    def mortal(self) -> Iterator[Reader]:
        """A reader of a process that the test may kill or freeze."""
        lending = LendingProcess(self.road, POOL_BYTES)
        reader = Reader(self.road, lending, goals=Goals(48 * MIB))
        yield reader
        reader.close()
        lending.close()

    def counts(self, reader: Reader, begun: Begun) -> bool:
        return reader.counts(begun, signed=self.road.kind.is_signed)

    def failed(self, reader: Reader, begun: Begun) -> ReadFailure:
        """Why the read failed; it must have."""
        end = reader.end_of(begun.number)
        assert self.is_failed(end), end
        return end.reason

    def is_failed(self, end: Ended) -> bool:
        """Whether a read failed, as this road may say it."""
        unproven = isinstance(end, ReadUnproven) and not self.road.kind.is_fenced
        return isinstance(end, ReadFailed) or unproven

    def stays_poisoned(self, reader: Reader, begun: Begun) -> bool:
        """Whether nothing is written, until the mover is closed, to a goal that is poisoned now: of
        an unproven read, once it is quiet. Of a dead peer it never is: beside it, then."""
        unproven = isinstance(reader.end_of(begun.number), ReadUnproven)
        if unproven and reader.lending.answers:
            reader.quiet_of(begun.number)
            unproven = False
        reader.goals.poison(begun.slot)
        reader.close()
        if unproven:
            return not reader.goals.late_beside([begun.slot])
        return reader.goals.is_poisoned(begun.slot)

    def warm_up(self, lending: LendingProcess) -> None:
        """Have an engine open once what it opens once: its threads, its connection to the peer."""
        reader = Reader(self.road, lending, goals=Goals(8 * MIB))
        reader.end_of(reader.read([(0, MIB)]).number)
        reader.close()

    def test_it_is_of_its_kind(self, reader: Reader) -> None:
        kind = self.road.kind
        assert reader.mover.name == kind.name
        assert reader.mover.is_fenced == kind.is_fenced
        assert reader.mover.is_signed == kind.is_signed

    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_bytes_come_as_they_were_lent(self, reader: Reader, shape: str) -> None:
        runs, cuts = SHAPES[shape]
        begun = reader.read(runs, cuts=cuts)
        landed = reader.end_of(begun.number)
        assert landed == ReadLanded(begun.number, sum(length for _, length in runs))
        assert self.counts(reader, begun)
        assert reader.is_right(begun)

    def test_nothing_beside_the_goal_is_written(self, reader: Reader) -> None:
        cuts = [(100, 50_000), (60_000, 9)]
        begun = reader.read([(0, 50_009)], cuts=cuts)
        reader.end_of(begun.number)
        for at, length in cuts:
            reader.goals.all_of(begun.slot)[at : at + length] = 0xA5
        assert (reader.goals.bytes == 0xA5).all()

    def test_reads_that_wait_for_each_other_all_land(self, reader: Reader) -> None:
        apart = [[(n * MIB + at, size) for at, size in scattered(8, 32 * KIB, seed=n)]
                 for n in range(12)]  # fmt: skip
        begun = [reader.read(runs) for runs in apart]
        for one in begun:
            assert isinstance(reader.end_of(one.number), ReadLanded)
            assert self.counts(reader, one)
            assert reader.is_right(one)

    def test_bytes_that_do_not_match_their_digest_are_corrupt(self, reader: Reader) -> None:
        begun, read = reader.prepare([(0, 100_000)])
        reader.mover.start(replace(read, digest=bytes(len(read.digest))))
        assert self.failed(reader, begun) is ReadFailure.CORRUPT

    def test_a_digest_under_a_key_is_checked_with_it(self, shared_lending: LendingProcess) -> None:
        good, bad = b"k" * 32, b"K" * 32
        reader = Reader(self.road, shared_lending, goals=Goals(8 * MIB), digests=KeyedBlake3(good))
        right, read = reader.prepare([(0, 3 * MIB)], key=good)
        reader.mover.start(read)
        assert isinstance(reader.end_of(right.number), ReadLanded)
        wrong, read = reader.prepare([(0, 3 * MIB)], key=bad)
        reader.mover.start(read)
        assert self.failed(reader, wrong) is ReadFailure.CORRUPT
        reader.close()

    def test_a_read_whose_deadline_has_passed_writes_nothing(self, reader: Reader) -> None:
        begun = reader.read([(0, MIB)], for_s=-1.0)
        assert self.failed(reader, begun) is ReadFailure.LATE
        reader.close()
        assert reader.goals.is_poisoned(begun.slot)

    def test_one_that_waits_beyond_its_deadline_is_late(self, reader: Reader) -> None:
        first, second, third = (reader.prepare([(n * MIB, MIB)]) for n in range(3))
        reader.mover.start(first[1])
        reader.mover.start(replace(second[1], deadline_s=0.0))
        reader.mover.start(third[1])
        assert self.failed(reader, second[0]) is ReadFailure.LATE
        reader.end_of(third[0].number)
        reader.close()
        assert reader.goals.is_poisoned(second[0].slot)

    def test_a_cancelled_read_ends_and_is_not_written_after(self, reader: Reader) -> None:
        begun = reader.read(BIG)
        reader.wait_for_first_bytes(begun)
        reader.mover.cancel(begun.number)
        end = reader.end_of(begun.number)
        assert isinstance(end, ReadLanded) or end.reason is ReadFailure.CANCELLED
        assert self.stays_poisoned(reader, begun)

    def test_one_cancelled_while_it_waits_writes_nothing(self, reader: Reader) -> None:
        running = reader.read(BIG)
        begun = reader.read([(0, MIB)])
        reader.mover.cancel(begun.number)
        end = reader.end_of(begun.number)
        assert isinstance(reader.end_of(running.number), ReadLanded | ReadFailed)
        reader.close()
        if end == ReadFailed(begun.number, ReadFailure.CANCELLED):
            assert reader.goals.is_poisoned(begun.slot) or self.road.kind.is_signed
        else:
            assert isinstance(end, ReadLanded) or self.is_failed(end)

    def test_to_cancel_what_is_over_or_unknown_is_no_error(self, reader: Reader) -> None:
        begun = reader.read([(0, 10)])
        reader.end_of(begun.number)
        reader.mover.cancel(begun.number)
        reader.mover.cancel(10**9)
        assert isinstance(reader.end_of(reader.read([(0, 10)]).number), ReadLanded)

    def test_a_ticket_revoked_before_never_counts(self, reader: Reader) -> None:
        begun, read = reader.prepare([(0, MIB)])
        reader.lending.reuse(begun.ticket)
        reader.mover.start(read)
        reader.end_of(begun.number)
        assert not self.counts(reader, begun)

    def test_one_revoked_amid_never_counts_with_other_bytes(self, reader: Reader) -> None:
        begun = reader.read(BIG)
        reader.wait_for_first_bytes(begun)
        reader.lending.reuse(begun.ticket)
        reader.end_of(begun.number)
        if self.counts(reader, begun):  # signed before it was revoked
            assert self.road.kind.is_signed
            assert reader.is_right(begun)

    def test_one_revoked_after_the_bytes_came_counts_only_if_signed(self, reader: Reader) -> None:
        begun = reader.read([(0, MIB)])
        reader.end_of(begun.number)
        reader.lending.revoke(begun.ticket)
        assert self.counts(reader, begun) == self.road.kind.is_signed

    def test_a_source_of_other_length_is_refused(self, reader: Reader) -> None:
        begun, read = reader.prepare([(0, 5000)])
        if not read.source or self.road.kind.is_signed:
            pytest.skip("reads by name: the source's runs are its own")
        for lengths in ([4999], [5001]):
            source = Runs(read.source.addresses, runs_of([(0, lengths[0])]).lengths)
            reader.mover.start(replace(read, source=source, number=read.number + lengths[0]))
            end = reader.end_of(read.number + lengths[0])
            assert end == ReadFailed(read.number + lengths[0], ReadFailure.REFUSED)
        reader.close()
        assert reader.goals.is_poisoned(begun.slot)

    @pytest.mark.parametrize(
        "forged",
        [(0, 5000), (1 << 61, 5000), (-5000, 5000), ((1 << 63) - 5, 5000), (4096, -1)],
        ids=["null", "high", "negative", "wraps", "negative length"],
    )
    def test_a_forged_address_is_refused(self, reader: Reader, forged: tuple[int, int]) -> None:
        begun, read = reader.prepare([(0, 5000)])
        if self.road.kind.is_signed:
            pytest.skip("reads by name: the source's runs are its own")
        reader.mover.start(replace(read, source=runs_of([forged])))
        assert self.failed(reader, begun) in (ReadFailure.REFUSED, self.forged_is)

    def test_its_descriptor_is_readable_while_there_is_something_to_tell(
        self, reader: Reader
    ) -> None:
        watched = reader.mover.fileno()
        assert select.select([watched], [], [], 0)[0] == []
        begun, read = reader.prepare([(0, 10)])
        reader.mover.start(read)
        assert select.select([watched], [], [], 300)[0] == [watched]
        assert [end.number for end in reader.mover.ended()] == [begun.number]
        assert select.select([watched], [], [], 0)[0] == []
        assert reader.mover.ended() == []

    def test_close_amid_reads_ends_them_and_every_thread(
        self, shared_lending: LendingProcess
    ) -> None:
        self.warm_up(shared_lending)
        files, threads, names = open_files(), own_threads(), python_threads()
        reader = Reader(self.road, shared_lending, goals=Goals(48 * MIB))
        begun = [reader.read(BIG), reader.read([(0, MIB)]), reader.read([(0, MIB)])]
        reader.wait_for_first_bytes(begun[0])
        reader.close()
        for one in begun:
            end = reader.ends[one.number]
            assert isinstance(end, ReadLanded) or self.is_failed(end)
            assert isinstance(end, ReadLanded) or end.reason is ReadFailure.CANCELLED
        late, read = reader.prepare([(0, 10)])
        reader.mover.start(read)
        assert reader.mover.ended() == [ReadFailed(late.number, ReadFailure.CANCELLED)]
        reader.mover.cancel(late.number)
        reader.mover.close()
        until(lambda: own_threads() <= threads, what="the end of the mover's threads")
        assert python_threads() == names
        assert open_files() == files

    def test_nothing_runs_while_there_is_nothing_to_do(
        self, shared_lending: LendingProcess
    ) -> None:
        self.warm_up(shared_lending)
        before = own_threads()
        reader = Reader(self.road, shared_lending, goals=Goals(8 * MIB))
        reader.end_of(reader.read([(0, MIB)]).number)
        own = own_threads() - before
        was = wakes(own)
        for _ in range(50):  # time passes: the lending process answers
            shared_lending.stands(0)
        assert wakes(own) - was <= 2 * len(own)
        reader.close()

    def test_a_killed_peer_is_lost(self, mortal: Reader) -> None:
        begun, read = mortal.prepare([(0, MIB)])
        mortal.lending.kill()
        mortal.mover.start(read)
        assert self.failed(mortal, begun) is ReadFailure.PEER_LOST

    def test_one_killed_amid_is_lost_or_had_brought_it(self, mortal: Reader) -> None:
        begun, waiting = mortal.read(BIG), mortal.read([(0, MIB)])
        mortal.wait_for_first_bytes(begun)
        mortal.lending.kill()
        for one in (begun, waiting):
            end = mortal.end_of(one.number)
            assert isinstance(end, ReadLanded) or self.is_failed(end)
            assert isinstance(end, ReadLanded) or end.reason is ReadFailure.PEER_LOST
        assert self.stays_poisoned(mortal, begun)

    def test_a_mover_to_a_dead_peer_says_so(self, mortal: Reader) -> None:
        begun, read = mortal.prepare([(0, MIB)])
        mortal.lending.kill()
        opened = Reader(self.road, mortal.lending, goals=mortal.goals)
        opened.mover.start(read)
        assert self.failed(opened, begun) is ReadFailure.PEER_LOST
        opened.close()

    def test_a_frozen_peer_ends_reads_by_their_deadline(self, mortal: Reader) -> None:
        begun, read = mortal.prepare([(0, 8 * MIB)], for_s=1.0)
        mortal.lending.freeze()
        if self.road.reads_frozen_peers:
            mortal.mover.start(replace(read, deadline_s=read.deadline_s + 3600))
            assert isinstance(mortal.end_of(begun.number), ReadLanded)
            assert mortal.is_right(begun)  # and counts once a `More` is answered: not by this one
        else:
            mortal.mover.start(read)
            assert self.failed(mortal, begun) is ReadFailure.LATE
        mortal.goals.poison(begun.slot)
        mortal.lending.thaw()
        mortal.lending.stands(0)  # it runs again
        if isinstance(mortal.ends[begun.number], ReadUnproven):
            mortal.quiet_of(begun.number)
            assert mortal.is_right(begun), "it is quiet because all of it landed, late"
            assert not mortal.goals.late_beside([begun.slot])
            mortal.goals.poison(begun.slot)
        again = mortal.read([(0, MIB)])
        mortal.end_of(again.number)
        mortal.close()
        assert mortal.goals.is_poisoned(begun.slot)

    def test_a_peer_that_is_killed_while_frozen_leaves_no_late_byte_beside_the_goal(
        self, mortal: Reader
    ) -> None:
        begun, read = mortal.prepare([(0, 8 * MIB)], for_s=0.2)
        after, lost = mortal.prepare([(0, 4096)])
        mortal.lending.freeze()
        mortal.mover.start(read)
        end = mortal.end_of(begun.number)
        assert isinstance(end, ReadLanded) or self.is_failed(end)
        mortal.lending.kill()
        mortal.mover.start(lost)
        assert self.failed(mortal, after) is ReadFailure.PEER_LOST
        mortal.close()
        assert mortal.goals.late_beside([begun.slot, after.slot]) == 0
        assert begun.number not in mortal.quiet, "nobody can know"

    def test_aborts_at_random_points_write_nothing_late(self) -> None:
        came = storm(self.road, trials=200, seed=11)
        assert came.late == 0
        assert came.landed > 0 and came.failed

    @pytest.mark.slow
    @pytest.mark.crash
    def test_thousands_of_aborts_at_random_points_write_nothing_late(self) -> None:
        """10,000 with OWNERSERVE_LONG=1: three to four minutes a road on a busy machine."""
        trials = 10_000 if os.environ.get("OWNERSERVE_LONG") else 1_500
        came = storm(self.road, trials=trials, seed=12)
        assert came.late == 0
        assert came.aborted >= trials
        print(came)


def wakes(threads: set[int]) -> int:
    """How often those threads of this process have been woken."""
    total = 0
    for thread in threads:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return total
