"""The worker side's threads: whatever goes wrong, blocks go back and the engine goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Lock
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ownerserve.engines.vllm.scheduler_side.pending_commands import PendingCommands, Tally
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    SaveCommand,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.engines.vllm.worker_side import worker as worker_module
from ownerserve.engines.vllm.worker_side.readers import Readers
from ownerserve.engines.vllm.worker_side.streams import HostStream
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.kv.errors import SpecMismatch
from ownerserve.kv.messages import Tier
from ownerserve.kv.units import MIB
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.vocabulary.events import Kept, NotKept
from ownerserve.store.format.model import ArtifactKind, Meta, MissReason, Want
from tests.support.store.samples import bytes_held

pytestmark = pytest.mark.engine

WAIT_S = 300.0
SIZE = 4096
PLACE = BlockPlace("dense", ((1,),), 0, 32)


class Pages:
    """A codec over nothing; `fault` is called where bytes would be read or written."""

    def __init__(self) -> None:
        self.fault: Callable[[], None] = lambda: None
        self.written: list[bytes] = []
        self.bite_bytes = SIZE

    def size(self, place: BlockPlace) -> int:
        return SIZE

    def read(self, place: BlockPlace, into: memoryview) -> None:
        self.fault()
        into[:] = b"k" * SIZE

    def cut(
        self, place: BlockPlace, data: memoryview, *, most_bytes: int
    ) -> Iterator[tuple[BlockPlace, memoryview]]:
        for at in range(0, len(data), self.bite_bytes):
            yield place, data[at : at + self.bite_bytes]

    def write(self, place: BlockPlace, data: memoryview) -> None:
        self.fault()
        self.written.append(bytes(data))


def failing(error: Exception) -> Callable[..., None]:
    def fault(*_: object) -> None:
        raise error

    return fault


def meta(number: int) -> Meta:
    return Meta(
        id=number.to_bytes(32, "big"),
        kind=ArtifactKind.RANGE,
        component="dense",
        prefix_hash=number.to_bytes(32, "big"),
        first_token=0,
        end_token=32,
    )


def save(worker: WorkerSide, *numbers: int) -> None:
    worker.save(
        WorkerCommands(saves=tuple(SaveCommand(number, meta(number), PLACE) for number in numbers))
    )


def until(worker: WorkerSide, done: Callable[[WorkerStepReport], bool]) -> WorkerStepReport:
    """Reports joined until `done` with them."""
    report, deadline = WorkerStepReport(), time.monotonic() + WAIT_S
    while not done(report):
        assert time.monotonic() < deadline, report
        worker.results(WorkerCommands(is_idle=True))
        report = report.joined(worker.report())
    return report


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def worker(tmp_path: Path, pages: Pages) -> Any:
    codec: Any = pages
    side = WorkerSide(open_backing(tmp_path, 0), codec, HostStream(), readers=2)
    yield side
    side.close()


def test_what_is_saved_is_brought(worker: WorkerSide, pages: Pages) -> None:
    save(worker, 1, 2, 3)
    report = until(worker, lambda r: len(r.kept) == 3)
    assert sorted(report.copied) == [1, 2, 3] and not report.not_kept
    wants = tuple(Want(meta(number).id) for number in (1, 2))
    worker.load(WorkerCommands(loads=(LoadInto("r", 9, wants, (PLACE, PLACE), WAIT_S),)))
    report = until(worker, lambda r: bool(r.loads))
    assert report.loads[0].reason == ""
    assert pages.written == [b"k" * SIZE] * 2


@pytest.mark.parametrize("error", [SpecMismatch("other"), RuntimeError("torch"), OSError(5, "io")])
def test_a_copy_that_fails_is_one_save_less(
    worker: WorkerSide, pages: Pages, error: Exception
) -> None:
    pages.fault = failing(error)
    save(worker, 1)
    report = until(worker, lambda r: bool(r.not_kept))
    assert (report.copied, report.not_kept) == ((1,), (1,))
    pages.fault = lambda: None
    save(worker, 2)
    assert until(worker, lambda r: bool(r.kept)).kept == (2,)


def test_a_mistake_of_ours_ends_saving_and_gives_every_block_back(
    worker: WorkerSide, pages: Pages
) -> None:
    """Nobody waits for a save that will never be made, and loads go on."""
    save(worker, 1)
    until(worker, lambda r: bool(r.kept))
    pages.fault = failing(AttributeError("a bug"))
    save(worker, 2, 3)
    report = until(worker, lambda r: len(r.not_kept) == 2)
    assert sorted(report.copied) == [2, 3]
    pages.fault = lambda: None
    save(worker, 4)
    report = until(worker, lambda r: bool(r.not_kept))
    assert (report.copied, report.not_kept) == ((4,), (4,))
    worker.load(WorkerCommands(loads=(LoadInto("r", 9, (Want(meta(1).id),), (PLACE,), WAIT_S),)))
    assert until(worker, lambda r: bool(r.loads)).loads[0].reason == ""


def test_copies_go_on_while_the_drive_is_written(worker: WorkerSide, tmp_path: Path) -> None:
    """Blocks are free when they are copied, however long a commit takes."""
    entered, may_go_on = Event(), Event()
    tiers: Any = worker._tiers  # noqa: SLF001 - a slow drive has no other door
    commit = tiers.commit

    def slow(reservations: Any) -> Any:
        entered.set()
        assert may_go_on.wait(WAIT_S)
        return commit(reservations)

    tiers.commit = slow
    save(worker, 1)
    assert entered.wait(WAIT_S)
    save(worker, 2, 3)
    report = until(worker, lambda r: len(r.copied) == 3)
    assert report.kept == ()
    may_go_on.set()
    assert sorted(until(worker, lambda r: len(r.kept) == 3).kept) == [1, 2, 3]


def test_a_mistake_of_ours_in_a_commit_ends_saving_and_answers_every_save_once(
    worker: WorkerSide,
) -> None:
    tiers: Any = worker._tiers  # noqa: SLF001 - as above
    tiers.commit = failing(AttributeError("a bug"))
    save(worker, 1, 2, 3)
    report = until(worker, lambda r: len(r.not_kept) == 3 and len(r.copied) == 3)
    save(worker, 4)
    report = report.joined(until(worker, lambda r: bool(r.not_kept)))
    assert sorted(report.copied) == sorted(report.not_kept) == [1, 2, 3, 4]
    assert report.kept == ()


def test_a_save_counts_when_every_rank_has_answered_and_is_kept_where_all_kept_it() -> None:
    """A rank whose store is full says another thing than its neighbour."""
    tally = Tally(2)
    assert list(tally.saved([1, 2], [])) == []
    assert list(tally.saved([1], [2])) == [Kept(1), NotKept(2)]
    assert list(tally.saved([], [3])) == []
    assert list(tally.saved([3], [])) == [NotKept(3)]


def test_points_are_ordered_before_ranges() -> None:
    pending = PendingCommands()
    point = msgspec.structs.replace(meta(2), kind=ArtifactKind.POINT, first_token=32)
    pending.save(SaveCommand(1, meta(1), PLACE))
    pending.save(SaveCommand(2, point, PLACE))
    assert [save.operation_id for save in pending.take(is_idle=False).saves] == [2, 1]
    assert pending.take(is_idle=False).saves == ()


def test_a_mistake_of_ours_in_a_load_is_that_loads_failure(
    worker: WorkerSide, pages: Pages
) -> None:
    save(worker, 1)
    until(worker, lambda r: bool(r.kept))
    pages.fault = failing(AttributeError("a bug"))
    worker.load(WorkerCommands(loads=(LoadInto("r", 9, (Want(meta(1).id),), (PLACE,), WAIT_S),)))
    received: set[str] = set()
    failed: set[str] = set()
    deadline = time.monotonic() + WAIT_S
    while not received:
        assert time.monotonic() < deadline
        one, other = worker.results(WorkerCommands(is_idle=True))
        received, failed = received | one, failed | other
    assert (received, failed) == ({"r"}, {"r"})
    assert worker.report().loads[0].reason


def loaded(worker: WorkerSide, *numbers: int) -> WorkerStepReport:
    """What came of a load of these records, once it is over."""
    wants = tuple(Want(meta(number).id) for number in numbers)
    load = LoadInto("r", 9, wants, (PLACE,) * len(wants), deadline_s=60)
    worker.load(WorkerCommands(loads=(load,)))
    return until(worker, lambda report: bool(report.loads))


def test_a_record_is_written_by_all_readers(
    worker: WorkerSide, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(worker, 1)
    until(worker, lambda report: report.kept == (1,))
    pages.bite_bytes = SIZE // 2
    monkeypatch.setattr(worker_module, "WRITE_BYTES", SIZE // 2)
    both_write = Barrier(2)  # one thread alone would wait here in vain
    pages.fault = lambda: both_write.wait(WAIT_S)  # type: ignore[assignment,return-value]
    (result,) = loaded(worker, 1).loads
    assert not result.reason
    assert b"".join(pages.written) == b"k" * SIZE
    assert len(pages.written) == 2


def test_a_load_is_over_when_its_last_bite_is_and_not_when_one_fails(
    worker: WorkerSide, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(worker, 1)
    until(worker, lambda report: report.kept == (1,))
    pages.bite_bytes = SIZE // 2
    monkeypatch.setattr(worker_module, "WRITE_BYTES", SIZE // 2)
    has_failed, may_write, first, both_write = Event(), Event(), Lock(), Barrier(2)

    def fault() -> None:
        both_write.wait(WAIT_S)
        if first.acquire(blocking=False):
            has_failed.set()
            raise SpecMismatch("made up")
        assert may_write.wait(WAIT_S)

    pages.fault = fault
    worker.load(
        WorkerCommands(loads=(LoadInto("r", 9, (Want(meta(1).id),), (PLACE,), deadline_s=60),))
    )
    assert has_failed.wait(WAIT_S)
    assert worker.results(None) == (set(), set())  # a write may still come: its blocks are kept
    may_write.set()
    report = until(worker, lambda report: bool(report.loads))
    assert report.loads[0].reason == MissReason.IO_ERROR


def test_what_host_memory_has_is_verified_bite_by_bite_and_a_bad_bite_is_written_nowhere(
    tmp_path: Path, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flipped in host memory fails the load; the record's other copy is on the drive."""
    codec: Any = pages
    backing = open_backing(tmp_path, 64 * MIB)
    assert backing is not None
    side = WorkerSide(backing, codec, HostStream(), readers=2)
    try:
        save(side, 1)
        until(side, lambda report: report.kept == (1,))
        pages.bite_bytes = SIZE // 2
        monkeypatch.setattr(worker_module, "WRITE_BYTES", SIZE // 2)
        assert not loaded(side, 1).loads[0].reason
        assert {(taken.tier, taken.bytes) for taken in backing.tiers.timings} == {
            (Tier.HOST, SIZE // 2)
        }
        pages.written.clear()
        bytes_held(backing.tiers.tiers[0], meta(1).id)[SIZE - 1] ^= 1
        (bad,) = loaded(side, 1).loads
        assert (bad.reason, bad.failed_id) == (MissReason.CORRUPT, meta(1).id)
        assert not pages.written  # both bites lie in the one chunk
        assert not loaded(side, 1).loads[0].reason
        assert b"".join(pages.written) == b"k" * SIZE
    finally:
        side.close()


def test_a_load_that_is_late_is_given_up_whole_and_its_records_stay(
    worker: WorkerSide, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before its time was over counts for nothing, since vLLM takes a load whole;
    another request finds every record again."""
    save(worker, 1, 2)
    until(worker, lambda report: set(report.kept) == {1, 2})
    monkeypatch.setattr(worker_module, "BATCH_BYTES", 1)
    hours = iter([0.0, 0.0, *[3600.0] * 100])  # the order, the first record, the second one
    with monkeypatch.context() as slow:
        slow.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: next(hours)))
        (late,) = loaded(worker, 1, 2).loads
    assert (late.reason, late.ids, late.failed_id) == (MissReason.DEADLINE, (), b"")
    (again,) = loaded(worker, 1, 2).loads
    assert again.ids == (meta(1).id, meta(2).id)


def test_what_was_read_is_written_before_more_is_read() -> None:
    done: list[str] = []
    readers, began, go_on = Readers(1), Event(), Event()

    def read() -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        readers.submit_first([partial(done.append, "bite 1"), partial(done.append, "bite 2")])

    readers.submit(read)
    assert began.wait(WAIT_S)
    readers.submit(partial(done.append, "next record"))
    go_on.set()
    readers.close()
    assert done == ["bite 1", "bite 2", "next record"]


def test_reports_join() -> None:
    one = WorkerStepReport(copied=(1,), stored_bytes=3)
    both = one.joined(msgspec.structs.replace(one, copied=(2,)))
    assert (both.copied, both.stored_bytes) == ((1, 2), 6)
