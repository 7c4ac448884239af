"""Many reads in the air at once: the bytes of each, its errors, and an early end."""

from __future__ import annotations

import errno
import mmap
import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from ownerserve.store.disk import aio
from ownerserve.store.disk.aio import DEPTH, ReadQueue
from ownerserve.store.disk.gather import (
    BUFFER_BYTES,
    CUT_BYTES,
    JOIN_BYTES,
    buffers,
    items_of,
    spans,
)
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import MissReason, Want
from ownerserve.store.format.segment import DirectRead
from ownerserve.store.index.reader import IndexEntry
from ownerserve.store.tiers.backend import put

BLOCKS = 400


@pytest.fixture
def file(tmp_path: Path):
    data = random.Random(0).randbytes(BLOCKS * BLOCK + 100)
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield fd, data
    os.close(fd)


def room(count: int) -> memoryview:
    return memoryview(mmap.mmap(-1, count))


def some(fd: int, count: int) -> list[DirectRead]:
    dice = random.Random(1)
    sizes = [dice.randrange(1, 9) * BLOCK for _ in range(count)]
    return [DirectRead(fd, dice.randrange(BLOCKS - 8) * BLOCK, room(size)) for size in sizes]


@pytest.mark.parametrize("count", [1, 2, DEPTH, 5 * DEPTH + 3])
def test_each_load_gets_its_bytes(file, count):
    fd, data = file
    queue, loads = ReadQueue(), some(fd, count)
    with closing(queue):
        results = dict(queue.run(loads))
    assert results == {index: len(load.into) for index, load in enumerate(loads)}
    for load in loads:
        assert load.into == data[load.offset : load.offset + len(load.into)]


def test_the_end_of_the_file_and_a_bad_file_are_told(file):
    fd, data = file
    loads = [
        DirectRead(fd, 0, room(BLOCK)),
        DirectRead(fd, BLOCKS * BLOCK, room(BLOCK)),
        DirectRead(9999, 0, room(BLOCK)),
        DirectRead(fd, BLOCK, room(BLOCK)),
    ]
    results = dict(ReadQueue().run(loads))
    assert results == {0: BLOCK, 1: 100, 2: -errno.EBADF, 3: BLOCK}
    assert loads[3].into == data[BLOCK : 2 * BLOCK]


def test_a_refusing_kernel_is_no_error(file, monkeypatch):
    fd, data = file

    def refuse(_self: object) -> None:
        raise OSError(errno.EPERM, "io_setup")

    monkeypatch.setattr(aio.KernelQueue, "__init__", refuse)
    loads = some(fd, 20)
    assert len(dict(ReadQueue().run(loads))) == 20
    assert all(load.into == data[load.offset : load.offset + len(load.into)] for load in loads)


@pytest.mark.parametrize("taken", [1, 3, DEPTH])
def test_stopping_early_waits_for_the_kernel(file, monkeypatch, taken):
    """Nothing may be in the air once the buffers are somebody else's."""
    fd, _ = file
    queue, air = ReadQueue(), set[int]()
    send, reap = aio.KernelQueue.send, aio.KernelQueue.reap

    def sent(self: aio.KernelQueue, loads: list[tuple[int, DirectRead]]) -> int:
        count = send(self, loads)
        air.update(tag for tag, _ in loads[:count])
        return count

    def reaped(self: aio.KernelQueue) -> list[tuple[int, int]]:
        found = reap(self)
        air.difference_update(tag for tag, _ in found)
        return found

    monkeypatch.setattr(aio.KernelQueue, "send", sent)
    monkeypatch.setattr(aio.KernelQueue, "reap", reaped)
    with closing(queue.run(some(fd, 60))) as arrivals:
        for _ in range(taken):
            next(arrivals)
    assert air == set()
    assert len(dict(queue.run(some(fd, 60)))) == 60, "the queue is good for the next reader"


def test_a_read_error_among_many_is_a_miss_and_no_quarantine(open_disk, samples, monkeypatch):
    tier = open_disk()
    for number in range(6):
        put(tier, samples.meta(number), samples.payload(number, 100_000))
    order = [4, 0, 2]
    real, calls = aio.KernelQueue.reap, []

    def failing(self: aio.KernelQueue) -> list[tuple[int, int]]:
        calls.append(1)
        return [(tag, -errno.EIO) for tag, _ in real(self)]

    def fail(*_args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(aio.KernelQueue, "reap", failing)
        assert samples.read(tier, *order) == [samples.payload(n, 100_000) for n in order]
        patch.setattr(os, "preadv", fail)
        assert samples.read(tier, *order) == MissReason.IO_ERROR
    assert calls, "these reads go through the queue"
    assert samples.read(tier, *order) == [samples.payload(n, 100_000) for n in order]


def entry(samples, number: int, offset: int, payload_bytes: int) -> IndexEntry:
    stored = BLOCK - (-payload_bytes // BLOCK) * BLOCK
    return IndexEntry(
        samples.meta(number, units=8), number, 1, offset, BLOCK, stored, payload_bytes, 0
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_spans_bring_just_what_the_wants_need(samples, seed):
    """Read by spans from a model of the segment: every item has landed whole, none overlaps."""
    dice = random.Random(seed)
    offset, entries = BLOCK, {}
    for number in range(dice.randrange(1, 30)):
        size = 8 * dice.choice((512, 8192, 1 << 17, 1 << 20))
        found = entry(samples, number, offset, size)
        entries[found.meta.id] = found
        offset += found.stored_bytes + dice.choice((0, 0, BLOCK))
    segment = dice.randbytes(offset)
    wants = [
        Want(id_, *dice.choice(((0, None), (3, 5), (7, 8)))) for id_ in dice.sample(
            sorted(entries), len(entries)
        )
    ]  # fmt: skip
    items = list(items_of(wants, entries))
    for size, group in buffers(items):
        memory, filled = bytearray(size), 0
        for span in spans(group):
            assert span.length <= max(CUT_BYTES, JOIN_BYTES)
            memory[span.place : span.place + span.length] = segment[
                span.offset : span.offset + span.length
            ]
            filled += span.length
            for item in span.items:
                item.waiting -= 1
        assert filled == size, "every byte once"
        assert size <= BUFFER_BYTES or len(group) == 1
        for item in group:
            at, own = item.place, item.entry
            body = own.offset + BLOCK + item.first
            assert item.waiting == 0
            assert memory[at : at + BLOCK] == segment[own.offset : own.offset + BLOCK]
            length = item.end - item.first
            assert memory[at + BLOCK : at + BLOCK + length] == segment[body : body + length]
