"""Scenarios over pages kept as bytes, for any KVCacheConfig: plain stand-ins or vLLM's own.

A pool of random bytes; a request's blocks in it; its state through WorkerSide and a store; a pool
of other random bytes; the state brought back into other blocks. Then every byte of the pool is
accounted for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.places import BlockPlaces
from ownerserve.engines.vllm.layout.shape import StateShape, describe
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    SaveCommand,
    WorkerCommands,
)
from ownerserve.engines.vllm.worker_side.streams import host_runtime, stream_of
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.kv.specs import Coverage
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.vocabulary.events import Filling
from ownerserve.store.format.model import ArtifactKind, Meta, Want

WAIT_S = 300.0
HOST_BYTES = {"cpu": 0, "cuda": 64 << 20}
"""Host memory for copies: page-locked where there is a device."""
BUSY_CYCLES = 1 << 30
"""About half a second of a device's time: far longer than a save takes to be asked for."""


class Pool:
    """vLLM's memory and the views of it, by layer."""

    def __init__(self, config: Any, caches: dict[str, Tensor], *, block_tokens: int = 0) -> None:
        self.config = config
        self.caches = caches
        self.shape: StateShape = describe(config, block_tokens=block_tokens, packed_by="test")
        self.codec = PageCodec(self.shape, caches, num_blocks=config.num_blocks, key_orders={})
        first = next(iter(caches.values()))
        self.bytes = torch.empty(0, dtype=torch.uint8, device=first.device)
        self.bytes.set_(first.untyped_storage())  # type: ignore[call-overload]
        self.dice = torch.Generator().manual_seed(7)

    def randomise(self) -> None:
        """Every byte of the pool, those of no layer too."""
        noise = torch.randint(0, 256, self.bytes.shape, generator=self.dice, dtype=torch.uint8)
        self.bytes.copy_(noise)

    def tables(self, tokens: int, *, seed: int) -> list[list[int]]:
        """A request's blocks once `tokens` are computed: a block belongs to one group, and what
        a window has left behind is the null block."""
        order = torch.randperm(
            self.config.num_blocks - 1, generator=torch.Generator().manual_seed(seed)
        )
        free = iter((order + 1).tolist())
        tables = []
        for group in self.config.kv_cache_groups:
            spec = compat.group_spec(group)
            window = getattr(spec, "sliding_window", None)
            kept = max(0, tokens - window + 1) // spec.block_size if window else 0
            if chunk := getattr(spec, "attention_chunk_size", None):
                kept = tokens // chunk * chunk // spec.block_size
            elif hasattr(spec, "mamba_type"):
                kept = tokens // spec.block_size - 1
            count = tokens // spec.block_size
            tables.append([0] * kept + [next(free) for _ in range(count - kept)])
        return tables

    def content(self, tables: list[list[int]]) -> dict[str, bytes]:
        """What each layer reads of a request's blocks, through vLLM's own views."""
        found = {}
        for group, table in zip(self.config.kv_cache_groups, tables, strict=True):
            for name in group.layer_names:
                own = self.caches[name].cpu()[[block for block in table if block]]
                found[name] = own.contiguous().view(torch.uint8).numpy().tobytes()
        return found

    def theirs(self, tables: list[list[int]]) -> Tensor:
        """Which bytes of the pool belong to those blocks' layers: the pages, padding included."""
        mine = torch.zeros(self.bytes.shape, dtype=torch.bool)
        groups = {n: g for g, at in enumerate(self.config.kv_cache_groups) for n in at.layer_names}
        for tensor in self.config.kv_cache_tensors:
            size = min(tensor.layer_stride, tensor.block_stride)
            for index, name in enumerate(tensor.layers):
                for block in filter(None, tables[groups[name]]):
                    at = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                    mine[at : at + size] = True
        return mine

    def sources(self, tables: list[list[int]], position: int) -> list[BlockPlace]:
        """All of a request's state at a boundary."""
        return [
            self.shape.place(
                name,
                tables,
                *(
                    (0, position)
                    if at.section.coverage is Coverage.RANGE
                    else self.shape.span(name, position)
                ),
            )
            for name, at in self.shape.components.items()
        ]

    def goals(self, tables: list[list[int]], position: int, *, hit: int = 0) -> list[BlockPlace]:
        """The same, where it is brought to."""
        places, block = BlockPlaces(self.shape), self.shape.payload.block_tokens
        return [
            places.goal(
                tables,
                Filling(
                    0,
                    name,
                    tuple(range(position // block))
                    if at.section.coverage is Coverage.RANGE
                    else (position,),
                ),
                hit=hit,
                window_hit=hit,
            )
            for name, at in self.shape.components.items()
        ]

    def read(self, place: BlockPlace) -> bytearray:
        data = bytearray(self.codec.size(place))
        self.codec.read(place, memoryview(data))
        return data


def meta(number: int, place: BlockPlace) -> Meta:
    return Meta(
        id=number.to_bytes(32, "big"),
        kind=ArtifactKind.RANGE,
        component=place.component,
        prefix_hash=number.to_bytes(32, "big"),
        first_token=0,
        end_token=place.end,
    )


def through_a_store(
    pool: Pool,
    folder: Path,
    sources: list[BlockPlace],
    goals: list[BlockPlace],
    *,
    forward: Callable[[], None] = lambda: None,
    reuse: Callable[[], None],
) -> None:
    """Save, overwrite the whole pool, load: what the connector's worker does. `forward` and
    `reuse` are the engine's, called right before the save and the load."""
    device = next(iter(pool.caches.values())).device
    backing = open_backing(folder, HOST_BYTES[device.type], cuda=host_runtime(device))
    worker = WorkerSide(backing, pool.codec, stream_of(device), readers=2)
    try:
        forward()
        saves = tuple(SaveCommand(n, meta(n, place), place) for n, place in enumerate(sources, 1))
        worker.save(WorkerCommands(saves=saves))
        report = worker.report()
        deadline = time.monotonic() + WAIT_S
        while len(report.kept) < len(saves):
            assert time.monotonic() < deadline and not report.not_kept, report
            worker.results(WorkerCommands(is_idle=True))
            report = report.joined(worker.report())
        reuse()
        wants = tuple(Want(meta(n, place).id) for n, place in enumerate(sources, 1))
        worker.load(WorkerCommands(loads=(LoadInto("r", 99, wants, tuple(goals), WAIT_S),)))
        received: set[str] = set()
        while not received:
            assert time.monotonic() < deadline
            received, failed = worker.results(WorkerCommands(is_idle=True))
            assert not failed, worker.report()
    finally:
        worker.close()


def comes_back_in_other_blocks(pool: Pool, folder: Path, position: int) -> None:
    """Every byte that a layer reads is the same, and no byte of anybody else's has changed."""
    pool.randomise()
    old, new = pool.tables(position, seed=1), pool.tables(position, seed=2)
    assert old != new
    truth = pool.content(old)
    assert set(truth) == set(pool.caches)
    assert all(map(len, truth.values()))
    sources, goals = pool.sources(old, position), pool.goals(new, position)
    assert all(map(pool.shape.is_there, [*sources, *goals]))
    state = pool.dice.get_state()
    through_a_store(pool, folder, sources, goals, reuse=pool.randomise)
    assert pool.content(new) == truth
    after = pool.bytes.cpu().clone()
    pool.dice.set_state(state)
    pool.randomise()  # the same bytes as before the load
    changed = pool.bytes.cpu() != after
    assert not (changed & ~pool.theirs(new)).any()
    assert changed.any()


def queued_work_comes_first(pool: Pool, folder: Path, position: int) -> None:
    """On a device the engine's thread runs ahead: a save reads what its forward, still queued,
    will have written, and a load writes over a zeroing that is still queued."""
    old, new = pool.tables(position, seed=9), pool.tables(position, seed=10)
    pool.randomise()
    computed = pool.bytes.clone()
    pool.bytes.zero_()
    torch.cuda.synchronize()

    def forward() -> None:
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 - torch has no public one
        pool.bytes.copy_(computed, non_blocking=True)

    def reuse() -> None:
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 - torch has no public one
        pool.bytes.zero_()

    sources, goals = pool.sources(old, position), pool.goals(new, position)
    through_a_store(pool, folder, sources, goals, forward=forward, reuse=reuse)
    torch.cuda.synchronize()
    found = pool.content(new)
    pool.bytes.copy_(computed)
    assert found == pool.content(old)


def one_spoilt_byte_shows(pool: Pool, position: int) -> None:
    """The control of the test above: bytes of a record that are no padding reach one layer."""
    pool.randomise()
    old, new = pool.tables(position, seed=3), pool.tables(position, seed=4)
    truth, goals = pool.content(old), pool.goals(new, position)
    records = [pool.read(place) for place in pool.sources(old, position)]
    for index, record in enumerate(records):
        filled = [at for at, byte in enumerate(record) if byte]
        for at in filled[:: max(1, len(filled) // 5)]:
            spoilt = bytearray(record)
            spoilt[at] ^= 0xFF
            for other, goal in enumerate(goals):
                pool.codec.write(goal, memoryview(spoilt if other == index else records[other]))
            found = pool.content(new)
            wrong = [name for name in truth if found[name] != truth[name]]
            assert len(wrong) == 1, (goals[index].component, at, wrong)


def own_hits_stay_as_they_are(pool: Pool, position: int, hit: int) -> None:
    """What the engine found itself may be in use by others: those blocks are not written."""
    pool.randomise()
    old, new = pool.tables(position, seed=5), pool.tables(position, seed=6)
    sizes = [compat.group_spec(group).block_size for group in pool.config.kv_cache_groups]
    payloads = [pool.read(place) for place in pool.sources(old, position)]
    truth, before = pool.content(old), pool.bytes.clone()
    for goal, data in zip(pool.goals(new, position, hit=hit), payloads, strict=True):
        pool.codec.write(goal, memoryview(data))
    shared = [
        [block if at < hit // size else 0 for at, block in enumerate(table)]
        for table, size in zip(new, sizes, strict=True)
    ]
    assert any(map(any, shared))
    own = pool.theirs(shared)
    assert torch.equal(pool.bytes.cpu()[own], before.cpu()[own])
    fresh = [
        [block if at >= hit // size else 0 for at, block in enumerate(table)]
        for table, size in zip(new, sizes, strict=True)
    ]
    found = pool.content(fresh)
    for name, data in found.items():
        assert data == truth[name][len(truth[name]) - len(data) :], name


def padding_is_left_behind(pool: Pool, position: int) -> int:
    """Bytes between pages are of whoever had the block before, perhaps another tenant: a record
    has zeros there. How many such bytes the records have."""
    pool.bytes.fill_(0xEE)
    tables = pool.tables(position, seed=8)
    zeros = read = held = 0
    for place in pool.sources(tables, position):
        data = pool.read(place)
        assert set(data) <= {0, 0xEE}
        zeros, read = zeros + data.count(0), read + len(data)
    for group, table in zip(pool.config.kv_cache_groups, tables, strict=True):
        for name in group.layer_names:
            cache = pool.caches[name]
            held += len(list(filter(None, table))) * cache[0].numel() * cache.element_size()
    assert read - zeros == held
    return zeros
