"""A pipeline's stages: what they describe alike, and what a stage does with commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.engines.vllm.layout.shape import NotServed, StateShape, describe
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    SaveCommand,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.engines.vllm.worker_side.stage import Stage
from ownerserve.engines.vllm.worker_side.streams import HostStream
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.node.storage.backing import open_backing
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import ArtifactKind, Meta, MissReason, Want
from tests.support.vllm_parts import specs
from tests.support.waits import until

pytestmark = pytest.mark.engine

LAYERS = (3, 3)
"""Of two stages, over three KV groups: sliding, sliding, full."""


def stage(*names: list[int], layers: tuple[int, ...] = LAYERS) -> StateShape:
    """What a stage describes that has these layers of the three groups."""
    groups = [specs.sliding(*names[0]), specs.sliding(*names[1]), specs.dense(*names[2])]
    return describe(specs.Config(groups), stage_layers=layers)


def test_stages_name_blocks_of_the_same_groups() -> None:
    """A place in blocks, made from the first stage's groups, means the same to the second, which
    has no layer of one of them."""
    first, second = stage([0], [1], [2]), stage([3, 4], [], [5])
    tables = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for name in ("swa", "dense"):
        assert first.components[name].groups == second.components[name].groups
        assert first.place(name, tables, 0, 64) == second.place(name, tables, 0, 64)
    assert first.group_tokens == second.group_tokens
    assert [len(second.components[name].layers) for name in ("swa", "dense")] == [2, 1]


def test_a_stage_without_a_kind_of_state_is_not_served() -> None:
    with pytest.raises(NotServed, match="no layer with dense"):
        stage([0], [1], [])


def test_a_model_that_is_cut_elsewhere_bears_another_name() -> None:
    """Also where the first stage is alike: another one has other layers under its ids."""
    cuts = [(3, 3), (3, 2, 1), (3, 1, 2), ()]
    digests = {stage([0], [1], [2], layers=cut).payload.digest() for cut in cuts if cut}
    alone = describe(specs.Config([specs.sliding(0), specs.sliding(1), specs.dense(2)]))
    assert len(digests | {alone.payload.digest()}) == len(cuts)


# ---- the worker


class Pages:
    """A codec over nothing."""

    def size(self, place: BlockPlace) -> int:
        return 4096

    def read(self, place: BlockPlace, into: memoryview) -> None:
        into[:] = b"k" * 4096

    def cut(
        self, place: BlockPlace, data: memoryview, *, most_bytes: int
    ) -> Iterator[tuple[BlockPlace, memoryview]]:
        yield place, data

    def write(self, place: BlockPlace, data: memoryview) -> None:
        assert bytes(data) == b"k" * 4096


PLACE = BlockPlace("dense", ((1,),), 0, 32)
STRANGE = BlockPlace("dense", ((1,), (2,)), 0, 32)
UNKNOWN = BlockPlace("swa", ((1,),), 0, 32)
STAGE = Stage({"dense": b"two layers"}, {"dense": 1})


def meta(number: int) -> Meta:
    name = number.to_bytes(32, "big")
    return Meta(name, ArtifactKind.RANGE, "dense", name, 0, 32, descriptor=b"three layers")


def told(worker: WorkerSide, done: Callable[[WorkerStepReport], bool]) -> WorkerStepReport:
    report = WorkerStepReport()

    def is_done() -> bool:
        nonlocal report
        worker.results(WorkerCommands(is_idle=True))
        report = report.joined(worker.report())
        return done(report)

    until(is_done)
    return report


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    codec: Any = Pages()
    side = WorkerSide(
        open_backing(tmp_path, 0), codec, HostStream(), readers=1, stage=STAGE, rank="stage-1-of-2"
    )
    yield side
    side.close()


def test_a_stages_records_say_what_it_has(worker: WorkerSide, tmp_path: Path) -> None:
    worker.save(WorkerCommands(saves=(SaveCommand(1, meta(1), PLACE),)))
    report = told(worker, lambda report: bool(report.kept))
    assert report.by_rank == (("stage-1-of-2", report.stored_bytes),)
    found = StoreSnapshot(tmp_path).find([meta(1).id])
    assert found[meta(1).id].meta.descriptor == STAGE.descriptors["dense"]
    want = Want(meta(1).id, descriptor=b"three layers")
    worker.load(WorkerCommands(loads=(LoadInto("r", 9, (want,), (PLACE,), 10.0),)))
    loaded = told(worker, lambda report: bool(report.loads)).loads[0]
    assert (loaded.reason, loaded.ids) == ("", (meta(1).id,))


@pytest.mark.parametrize("place", [STRANGE, UNKNOWN])
def test_what_a_stage_can_not_take_is_answered(worker: WorkerSide, place: BlockPlace) -> None:
    """The blocks are free at once, nothing is kept, and the load has failed: nobody waits."""
    worker.save(WorkerCommands(saves=(SaveCommand(1, meta(1), place),)))
    report = told(worker, lambda report: bool(report.not_kept))
    assert (report.copied, report.not_kept, report.kept) == ((1,), (1,), ())
    worker.load(WorkerCommands(loads=(LoadInto("r", 9, (Want(meta(1).id),), (place,), 10.0),)))
    received, failed = worker.results(WorkerCommands())
    assert (received, failed) == ({"r"}, {"r"})
    assert worker.report().loads[0].reason == MissReason.FOREIGN_LAYOUT
