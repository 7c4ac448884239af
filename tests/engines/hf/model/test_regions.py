"""What others may read of the pools: where each slot lies, and from when on a layer's state is
there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest

torch = pytest.importorskip("torch", reason="the hf engine needs the [engine] extra")
pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

import numpy as np  # noqa: E402

from ownerserve.cache.effects import MoveBorder  # noqa: E402
from ownerserve.engines.hf.model.runner import DecodeRow, ModelRunner  # noqa: E402
from ownerserve.engines.hf.model.tiny import TINY_MODELS, random_model, tiny_config  # noqa: E402
from ownerserve.engines.hf.node.port import HfPort  # noqa: E402
from ownerserve.engines.hf.state.host_memory import arena_memory  # noqa: E402
from ownerserve.kv.ids import TurnId  # noqa: E402
from ownerserve.node.transfers.landing import Landing  # noqa: E402
from ownerserve.transfer.control.events import WantedArtifact  # noqa: E402
from ownerserve.transfer.layout.joining import join  # noqa: E402
from ownerserve.transfer.layout.places import RegionPlaces  # noqa: E402
from ownerserve.transfer.vocabulary import FramePiece  # noqa: E402

pytestmark = pytest.mark.engine

TURN = TurnId("t")
SHM = Path("/dev/shm")
FAMILIES = sorted(TINY_MODELS)


def region_of(port, component):
    return next(one for one in port.regions() if one.section.name == component)


def read_lane(lane, slot):
    """The bytes of a block of a lane, by its address alone."""
    address = lane.address + slot * lane.block_bytes
    raw = np.frombuffer((ctypes.c_char * lane.span_bytes).from_address(address), np.uint8)
    shape, strides = (*lane.counts, lane.item_bytes), (*lane.strides, 1)
    return np.lib.stride_tricks.as_strided(raw, shape, strides).tobytes()


def read_unit(region, slot):
    """A unit of the frame, put together from its lanes."""
    unit = bytearray(region.section.unit_bytes)
    for lanes, offsets in zip(region.lanes, region.section.offsets(), strict=True):
        for lane, offset in zip(lanes, offsets, strict=True):
            data = read_lane(lane, slot)
            unit[offset : offset + len(data)] = data
    return bytes(unit)


def fill(port, slots, *, seed=0):
    """Random bytes in every slot, padding zero as it is; returns them."""
    random = np.random.default_rng(seed)
    held = {}
    for region in port.regions():
        name = region.section.name
        for slot in range(slots[name]):
            unit = np.zeros(region.section.unit_bytes, np.uint8)
            for part, offsets in zip(region.section.parts, region.section.offsets(), strict=True):
                end = offsets[0] + part.payload_bytes
                unit[offsets[0] : end] = random.integers(0, 256, part.payload_bytes, np.uint8)
            held[name, slot] = unit.tobytes()
            port.write_slots(name, [slot], memoryview(held[name, slot]))
    return held


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_lies_where_its_region_says(family):
    runner = ModelRunner(random_model(tiny_config(family)))
    layout = runner.layout
    slots = {c.name: 5 if c.name in layout.range_names else 3 for c in layout.components}
    runner.allocate(slots, 2)
    port = HfPort(runner)
    held = fill(port, slots)
    assert {region.section.name for region in port.regions()} == set(slots)
    for region in port.regions():
        region.check()
        assert region.blocks == slots[region.section.name]
        name = region.section.name
        for slot in range(region.blocks):
            assert read_unit(region, slot) == held[name, slot]
            assert bytes(port.read_slots(name, [slot])) == held[name, slot]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_lent_goes_as_it_lies(family):
    """Of scattered slots each is one copy, whole, into where a peer's bring lands: a pool has the
    frame's own order, so that equal layouts go raw."""
    runner = ModelRunner(random_model(tiny_config(family)))
    runner.allocate({c.name: 5 for c in runner.layout.components}, 2)
    for region in HfPort(runner).regions():
        section = region.section
        piece = FramePiece(bytes(32), 0, 5, 0, section.layers)
        wanted = WantedArtifact(section.name, piece, 5 * section.payload_bytes)
        goal = Landing([wanted], {section.name: section}).runs(piece)
        source = RegionPlaces(region).runs(piece, [np.array([4, 2, 0, 3, 1])])
        padded = sum(part.payload_bytes != part.padded_bytes for part in section.parts[:-1])
        assert len(join(goal, source).lengths) == 5 * (1 + padded)


def test_the_border_moves_no_address_and_changes_how_many_there_are():
    runner = ModelRunner(random_model(tiny_config("tiny-v4")))
    layout = runner.layout
    slots = {c.name: 8 for c in layout.components}
    runner.allocate(slots, 2)
    port = HfPort(runner)
    held, before = fill(port, slots), port.regions()
    assert port.regions() is before
    sizes = {c.name: c.slot_bytes for c in layout.components}
    block = sum(sizes[name] for name in layout.range_names)
    point = sum(sizes[name] for name in layout.point_names)
    points = 3
    blocks = (8 * block + 8 * point - points * point) // block
    assert blocks > 8
    moved = dict.fromkeys(layout.point_names, ((7, 2),))
    runner.apply([MoveBorder(blocks, points, (), moved)])
    after = {region.section.name: region for region in port.regions()}
    for region in before:
        name = region.section.name
        assert after[name].lanes == region.lanes
        assert after[name].blocks == (blocks if name in layout.range_names else points)
        after[name].check()
        for slot in range(min(8, after[name].blocks)):
            was = 7 if name in layout.point_names and slot == 2 else slot
            assert read_unit(after[name], slot) == held[name, was]


READER = """
import mmap, os, sys
name, offset, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = mmap.mmap(os.open(name, os.O_RDONLY), 0, prot=mmap.PROT_READ)
sys.stdout.buffer.write(memory[offset:offset + count])
"""


def test_another_process_reads_a_slot_through_the_shared_object():
    runner = ModelRunner(random_model(tiny_config("tiny-qwen3")))
    slots = {c.name: 4 for c in runner.layout.components}
    runner.allocate(slots, 1)
    port = HfPort(runner)
    held = fill(port, slots)
    region = region_of(port, "dense")
    shared = region.shared
    assert shared is not None and shared.name.startswith(f"/proc/{os.getpid()}/fd/")
    with Path(shared.name).open("rb") as opened:
        assert fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert shared.address <= region.address
    assert region.address + region.bytes <= shared.address + shared.bytes
    lane = region.lanes[0][0]
    offset = lane.address + 2 * lane.block_bytes - shared.address
    seen = subprocess.run(
        [sys.executable, "-c", READER, shared.name, str(offset), str(lane.bytes)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    ).stdout
    assert seen == held["dense", 2][: lane.bytes]


HOLDER = """
import sys, torch
from ownerserve.engines.hf.state.host_memory import arena_memory
memory = arena_memory(1 << 20, torch.device("cpu"))
memory.tensor[:] = 7
print(memory.shared.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "left"])
def test_nothing_is_left_of_a_process_that_has_ended(how):
    before = set(SHM.iterdir())
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    name = child.stdout.readline().strip()
    assert Path(name).stat().st_size == 1 << 20
    if how == "killed":
        child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == (-signal.SIGKILL if how == "killed" else 0)
    assert not Path(name).exists()
    assert not {one for one in set(SHM.iterdir()) - before if "ownerserve" in one.name}


def test_an_arena_lets_go_of_its_memory_with_its_last_tensor():
    memory = arena_memory(1 << 16, torch.device("cpu"))
    view, name = memory.tensor[100:200], Path(memory.shared.name)
    target = name.readlink()
    del memory
    view[:] = 3
    assert name.readlink() == target, "somebody looks into it"
    del view
    assert not name.is_symlink() or name.readlink() != target


def test_an_arena_without_a_memfd_is_plain_memory(monkeypatch):
    def refused(*_):
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refused)
    memory = arena_memory(64, torch.device("cpu"))
    assert memory.shared is None and not memory.tensor.any()


class Reader:
    """A thread that reads layers by their addresses the moment they are done, while the engine
    waits in the middle of its forward."""

    def __init__(self, port, table, block):
        self.port, self.table, self.block = port, table, block
        self.seen = []
        self.jobs, self.done = SimpleQueue(), SimpleQueue()
        self.thread = Thread(target=self._run)
        self.thread.start()

    def told(self, progress):
        assert self.port.layers_done(TURN) is progress
        self.jobs.put(progress)
        self.done.get(timeout=60)

    def _run(self):
        while (progress := self.jobs.get()) is not None:
            self.seen.append((progress, self.read(progress)))
            self.done.put(None)

    def close(self):
        self.jobs.put(None)
        self.thread.join()

    def read(self, progress):
        """By component, layer, part and block: the bytes of all blocks that are full by then, of
        every layer."""
        found = {}
        for region in self.port.regions():
            name = region.section.name
            if name not in self.table.range:
                continue
            full = progress.end // self.block
            for part, lanes in enumerate(region.lanes):
                for layer, lane in enumerate(lanes):
                    for block, slot in enumerate(self.table.range[name][:full]):
                        found[name, layer, part, block] = read_lane(lane, slot)
        return found


def test_a_layer_that_is_done_reads_as_at_the_turns_end(lab, text):
    port = HfPort(lab.runner)
    count = 4 * lab.block
    tokens, table = text(count), lab.sequence(count)
    reader = Reader(port, table, lab.block)
    port.watch_layers(TURN, reader.told)
    assert port.layers_done(TURN) is None
    chunks = [(0, lab.block + 3), (lab.block + 3, 3 * lab.block), (3 * lab.block, count - 2)]
    try:
        for start, end in chunks:
            lab.runner.prefill(table, tokens[start:end], start, turn_id=TURN)
        for at in range(count - 2, count):
            lab.runner.decode([DecodeRow(table, tokens[at], at, TURN)])
    finally:
        reader.close()
    last = reader.read(reader.seen[-1][0])
    layers = {region.section.name: region.section.layers for region in port.regions()}
    for progress, seen in reader.seen:
        for key, data in seen.items():
            name, layer, _, _ = key
            if layer < progress.layers[name]:
                assert data == last[key], f"{key} changed after it was said to be done"
    spans = {(progress.start, progress.end) for progress, _ in reader.seen}
    assert spans == {*chunks, (count - 2, count - 1), (count - 1, count)}
    final = [progress for progress, _ in reader.seen if progress.end == count][-1]
    assert final.layers == {name: layers[name] for name in table.range}
    assert port.layers_done(TURN) == final
    port.unwatch_layers(TURN)
    assert port.layers_done(TURN) is None


def test_a_layer_is_told_before_the_next_one_is_computed(lab, text):
    """Else there would be nothing to send while the forward goes on."""
    port = HfPort(lab.runner)
    table = lab.sequence(2 * lab.block)
    for region in port.regions():  # as if nobody had used the slots
        for slot in table.range.get(region.section.name, ()):
            zeros = memoryview(bytes(region.section.unit_bytes))
            port.write_slots(region.section.name, [slot], zeros)
    reader = Reader(port, table, lab.block)
    port.watch_layers(TURN, reader.told)
    try:
        lab.runner.prefill(table, text(2 * lab.block), 0, turn_id=TURN)
    finally:
        reader.close()
    last = reader.read(reader.seen[-1][0])
    layers = {(name, layer) for name, layer, _, _ in last}
    progress, seen = next(one for one in reader.seen if any(one[0].layers.values()))
    done = {(name, layer) for name, layer in layers if layer < progress.layers[name]}
    assert all(seen[key] == last[key] for key in last if key[:2] in done)
    if len(layers) > 1:  # else there is nothing that could come later
        assert any(seen[key] != last[key] for key in last if key[:2] not in done)


def test_of_a_batch_only_the_turn_that_is_watched_is_told(make_lab):
    lab = make_lab(tiny_config("tiny-qwen3"))
    port, told = HfPort(lab.runner), []
    tables = [lab.sequence(8) for _ in range(2)]
    for table, name in zip(tables, ("t", "u"), strict=True):
        lab.runner.prefill(table, [1, 2, 3], 0, turn_id=TurnId(name))
    port.watch_layers(TURN, told.append)
    names = (TURN, TurnId("u"))
    lab.runner.decode([DecodeRow(t, 4, 3, n) for t, n in zip(tables, names, strict=True)])
    assert {(one.start, one.end) for one in told} == {(3, 4)}
    assert port.layers_done(TurnId("u")) is None
    layers = region_of(port, "dense").section.layers
    assert [one.layers["dense"] for one in told] == list(range(1, layers + 1))
