"""Pages in every layout that vLLM has, with a reference that copies a token at a time, and what a
codec has to do over them. Needs no vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.shape import StateShape, describe
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.frame import DENSE, MLA, WINDOW
from tests.support.vllm_parts import specs

CPU = "cpu tiles"
LAYOUTS: dict[str, tuple[int, ...]] = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
    CPU: (0, 1, 2, 3, 4),
}
"""vLLM 0.32's KVCacheLayout: where each of layers, blocks, heads, tokens and content lies; and what
its CPU kernels make of the first."""
NOT_OURS = -1
UNITS = 4
"""Of the longest prefix that is played."""


def codec_of(config: Any, caches: dict[str, Tensor], *, block_tokens: int = 0) -> PageCodec:
    orders = {DENSE: None, WINDOW: None}
    shape = describe(config, block_tokens=block_tokens)
    return PageCodec(shape, caches, num_blocks=config.num_blocks, key_orders=orders)


@dataclass
class Pages:
    """A model's pages: full attention, and as many layers with a window."""

    layout: str = "LBNHC"
    dtype: torch.dtype = torch.bfloat16
    layers: int = 2
    heads: int = 2
    dim: int = 16
    block: int = 16
    unit: int = 32
    window: int = 32
    kernel_blocks: int = 1
    allocations: str = "one"
    seed: int = 7
    tokens: int = 0
    """Of the longest prefix, where that is more than what is played."""

    def __post_init__(self) -> None:
        if self.layout == CPU:
            self.kernel_blocks = 1
        self.dice = random.Random(self.seed)
        self.names = {
            DENSE: [specs.layers(n)[0] for n in range(self.layers)],
            WINDOW: [specs.layers(self.layers + n)[0] for n in range(self.layers)],
        }
        depth = max(UNITS * self.unit, self.tokens) // self.block
        self.blocks = 2 * depth + 1
        self.memory = {name: self._allocate() for name in self.names}
        self.caches = {
            layer: cache
            for name, layers in self.names.items()
            for layer, cache in zip(layers, self._views(self.memory[name]), strict=True)
        }
        self.randomise()

    @cached_property
    def shape(self) -> StateShape:
        return describe(self.config, block_tokens=self.unit)

    @property
    def config(self) -> specs.Config:
        made = (self.block, self.heads, self.dim, self.dtype)
        groups = [
            specs.Group(self.names[DENSE], specs.FullAttentionSpec(*made)),
            specs.Group(
                self.names[WINDOW], specs.SlidingWindowSpec(*made, sliding_window=self.window)
            ),
        ]
        return specs.Config(groups, num_blocks=self.blocks)

    @property
    def tile(self) -> int:
        return max(1, self.block // 2)

    def codec(self, **settings: Any) -> PageCodec:
        order = None
        if self.layout == CPU:
            plain = torch.arange(self.block * self.dim).view(-1, self.tile, self.dim)
            order = plain.transpose(1, 2).reshape(-1).tolist()
        return PageCodec(
            self.shape,
            self.caches,
            num_blocks=self.blocks,
            key_orders={DENSE: order, WINDOW: order},
            **settings,
        )

    def _allocate(self) -> list[Tensor]:
        """Memory of all layers, or of each, in the order in which it lies."""
        rows, count = self.block // self.kernel_blocks, self.blocks * self.kernel_blocks
        sizes = (self.layers, count, self.heads, rows, 2 * self.dim)
        order = LAYOUTS[self.layout]
        if self.allocations == "one":
            return [torch.zeros([sizes[axis] for axis in order], dtype=self.dtype)]
        own = [sizes[axis] for axis in order if axis]
        return [torch.zeros(own, dtype=self.dtype) for _ in range(self.layers)]

    def _views(self, memory: list[Tensor]) -> list[Tensor]:
        """Every layer's [blocks, heads, tokens, content]."""
        order = LAYOUTS[self.layout]
        if self.allocations == "one":
            return list(memory[0].permute([order.index(axis) for axis in range(5)]))
        own = [axis for axis in order if axis]
        return [each.permute([own.index(axis) for axis in range(1, 5)]) for each in memory]

    def randomise(self) -> None:
        generator = torch.Generator().manual_seed(self.dice.randrange(1 << 30))
        for each in self.bytes():
            noise = torch.randint(0, 256, each.shape, generator=generator, dtype=torch.uint8)
            each.copy_(noise)

    def bytes(self) -> Iterator[Tensor]:
        for memory in self.memory.values():
            yield from (each.view(-1).view(torch.uint8) for each in memory)

    def row(self, name: str, layer: int, part: int, *, block: int, token: int) -> Tensor:
        """One token's keys or values, [heads, dim], where they lie: as vLLM's kernels find them."""
        cache = self.caches[self.names[name][layer]]
        if self.layout == CPU:
            half = cache.view(self.blocks, self.heads, 2, -1)[block, :, part]
            if part:
                return half.view(self.heads, self.block, self.dim)[:, token]
            tiles = half.view(self.heads, -1, self.dim, self.tile)
            return tiles[:, token // self.tile, :, token % self.tile]
        rows = self.block // self.kernel_blocks
        own = cache[block * self.kernel_blocks + token // rows, :, token % rows]
        return own[:, part * self.dim : (part + 1) * self.dim]

    def table(self, *, half: int) -> list[int]:
        """Blocks of a request, in any order; of two halves none is in both."""
        each = self.blocks // 2
        blocks = list(range(1 + half * each, 1 + (half + 1) * each))
        self.dice.shuffle(blocks)
        return blocks

    def place(self, name: str, start: int, end: int, *, half: int = 0) -> BlockPlace:
        tables = [self.table(half=half), self.table(half=half)]
        return self.shape.place(name, tables, start, end)

    def slices(self, place: BlockPlace, frame: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For every number of a place, a token of a layer's part at a time: its block, where it
        lies in the pages, and where in the frame's bytes."""
        name = place.component
        section = self.shape.components[name].section
        row = self.heads * self.dim * self.dtype.itemsize
        ring = self.window - 1
        first = place.start // self.block
        for part, starts in enumerate(section.offsets()):
            for layer, begin in enumerate(starts):
                for position in range(place.start, place.end):
                    block = place.blocks[0][position // self.block - first]
                    at = begin + position % ring * row
                    if name == DENSE:
                        unit, inside = divmod(position - place.start, self.unit)
                        at = unit * section.unit_bytes + begin + inside * row
                    token = position % self.block
                    there = self.row(name, layer, part, block=max(block, 0), token=token)
                    yield block, there, frame[at : at + row]


def as_bytes(row: Tensor) -> Tensor:
    return row.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def round_trip(played: Pages) -> None:
    """Read a place of each component, then write it elsewhere, but for some blocks; after each,
    every byte is what the loop makes of it."""
    codec, dice = played.codec(), played.dice
    units = dice.randrange(1, UNITS + 1)
    first = dice.randrange(units)
    position = units * played.unit
    start = max(0, position - played.window + 1)
    spans = {
        DENSE: (first * played.unit, position),
        WINDOW: (dice.choice([start, dice.randrange(start, position)]), position),
    }
    for name, span in spans.items():
        place = played.place(name, *span)
        data = bytearray(b"\xee" * codec.size(place))
        codec.read(place, memoryview(data))
        expected = torch.zeros(len(data), dtype=torch.uint8)
        for _, there, here in played.slices(place, expected):
            here.copy_(as_bytes(there))
        assert bytes(data) == expected.numpy().tobytes()

        goal = played.place(name, *span, half=1)
        kept = tuple(NOT_OURS if dice.random() < 0.3 else block for block in goal.blocks[0])
        goal = BlockPlace(name, (kept,), goal.start, goal.end)
        before = [each.clone() for each in played.bytes()]
        for block, there, here in played.slices(goal, expected):
            if block >= 0:
                there.copy_(here.clone().view(played.dtype).view(there.shape))
        wanted = [each.clone() for each in played.bytes()]
        for each, was in zip(played.bytes(), before, strict=True):
            each.copy_(was)
        codec.write(goal, memoryview(bytes(data)))
        for each, wants in zip(played.bytes(), wanted, strict=True):
            assert torch.equal(each, wants)


def latent_round_trip(*, kernel_blocks: int) -> None:
    """A latent page of both shapes that vLLM has, cut into kernel blocks."""
    block, dim, blocks = 32, 24, 12
    spec = specs.MLAAttentionSpec(block, 1, dim, torch.bfloat16)
    config = specs.Config([specs.Group(specs.layers(0), spec)], num_blocks=blocks)
    rows = block // kernel_blocks
    memory = torch.randn(blocks, block, dim).to(torch.bfloat16)
    for shape in (
        (blocks * kernel_blocks, rows, dim),
        (blocks * kernel_blocks, 1, rows, dim),
    ):
        cache = memory.clone().view(shape)
        codec = codec_of(config, {specs.layers(0)[0]: cache})
        data = bytearray(codec.size(BlockPlace(MLA, ((7, 2, 3),), 0, 3 * block)))
        codec.read(BlockPlace(MLA, ((7, 2, 3),), 0, 3 * block), memoryview(data))
        assert bytes(data) == as_bytes(memory[[7, 2, 3]]).numpy().tobytes()
        codec.write(BlockPlace(MLA, ((1, NOT_OURS, 9),), 0, 3 * block), memoryview(data))
        wanted = memory.clone()
        wanted[1], wanted[9] = memory[7], memory[3]
        assert torch.equal(as_bytes(cache), as_bytes(wanted))
