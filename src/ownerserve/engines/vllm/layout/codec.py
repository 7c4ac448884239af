"""The codec says where vLLM's pages have what the frame has, and copies by that. Owns no block.

    page of a layer   [blocks, heads, tokens, keys | values]       logical, whatever lies beneath
    on a CPU          [blocks, heads, keys of all tokens, then values], keys in the kernel's order
    kernel blocks     [n * blocks, heads, tokens / n, ...]         where vLLM's kernels take less
    frame             kv.frame: [layers, tokens, heads, dim], keys and values apart
    pages as bytes    rows of `packed`, [blocks, bytes of the pages that touch]

Every layer, or row, gets strided views of its page once, and from these a `Lane` of kv.frame; a
copy is then a list of pieces for `copies`, which moves them all together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ownerserve.engines.vllm.layout.copies import (
    PAGE_BYTES,
    Copies,
    Form,
    Offsets,
    Pieces,
    host_copies,
)
from ownerserve.engines.vllm.layout.device import DeviceCopies
from ownerserve.engines.vllm.layout.packed import PageRun
from ownerserve.engines.vllm.layout.shape import ComponentMap, StateShape
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import (
    CONV,
    LEAD,
    MLA,
    RECURRENT,
    WINDOW,
    WINDOW_PAGES,
    Lane,
    PayloadPart,
)
from ownerserve.kv.specs import Coverage
from ownerserve.kv.units import MIB

LATENT_DIMS = 3
BY_ROW = (WINDOW, LEAD)
"""Components of which any run of tokens is copied, and not blocks as they are."""


class Series(msgspec.Struct, frozen=True):
    """A `Series` is one part of one layer as [blocks, tiles, rows, ...]: token t of a block is row
    t % rows of tile t // rows. `holes` are bytes of the last axis that belong to no layer."""

    view: Tensor
    group: int
    block_tokens: int
    holes: tuple[slice, ...] = ()

    @property
    def rows(self) -> int:
        """Return how many tokens a tile has."""
        return self.view.shape[2]

    def lane(self) -> Lane:
        """Return the series as kv.frame describes it."""
        item = self.view.element_size()
        block, *strides = (stride * item for stride in self.view.stride())
        shape = tuple(self.view.shape[1:])
        return Lane(self.view.data_ptr(), block, shape, tuple(strides), item)


class Lanes(msgspec.Struct, frozen=True, eq=False):
    """`Lanes` are layers of one component whose blocks are of one form and in one allocation, in
    the frame's order. For each: its `begins` in memory and in a unit (`offsets`), and which of
    `tables` has its blocks: these are groups of the component.

    `form` is what pieces have in common: a block each, or, in a window, one token's row.
    """

    lane: Lane
    form: Form
    begins: Offsets
    offsets: Offsets
    tables: tuple[int, ...]
    which: Offsets
    fresh: NDArray[np.bool_]
    block_tokens: int

    def at_tokens(self, blocks: Offsets, inside: Offsets) -> Offsets:
        """Return where tokens are, [lanes, tokens], given each one's block, [lanes, tokens], and
        its place in the block."""
        _, rows = self.lane.counts[:2]
        tile_bytes, row_bytes = self.lane.strides[:2]
        within = inside // rows * tile_bytes + inside % rows * row_bytes
        found: Offsets = self.begins[:, None] + blocks * self.lane.block_bytes + within
        return found


class PageCodec:
    """A `PageCodec` reads and writes places. Thread-safe: it keeps nothing of a call."""

    def __init__(
        self,
        shape: StateShape,
        caches: Mapping[str, Any],
        *,
        num_blocks: int,
        key_orders: Mapping[str, Sequence[int] | None],
        transposed: Collection[str] = (),
        staging_bytes: int = 64 * MIB,
    ) -> None:
        """Make the views of `caches`. `key_orders` says, by component, how a block's keys lie
        (compat.cpu_key_order). Raises InvalidInput for pages of another form.

        `transposed`: components whose state lies with its last two axes swapped. `staging_bytes`
        of a device are taken where the caches are on one.
        """
        self._shape = shape
        self._num_blocks = num_blocks
        self._key_orders = key_orders
        self._transposed = transposed
        self._parts: dict[str, tuple[tuple[Series, ...], ...]] = {}
        for name, at in shape.components.items():
            if at.rows:
                self._parts[name] = tuple(
                    tuple(self._row(name, row, caches) for row in rows) for rows in at.rows
                )
                continue
            layers = [self._series(name, caches[layer.name], layer.group) for layer in at.layers]
            # By part, then by layer: as a unit lies.
            self._parts[name] = tuple(zip(*layers, strict=True))
        self._with_holes = {
            name
            for name, parts in self._parts.items()
            if any(series.holes for part in parts for series in part)
        }
        self._lanes = {name: self._lanes_of(name) for name in self._parts}
        views = [part[0].view for parts in self._parts.values() for part in parts]
        self._copies: Copies
        if views and views[0].device.type != "cpu":
            self._copies = DeviceCopies(views[0].device, staging_bytes)
        else:
            self._copies = host_copies()

    def _series(self, name: str, cache: Any, group: int) -> tuple[Series, ...]:
        at, blocks = self._shape.components[name], self._num_blocks
        if not isinstance(cache, Tensor) or cache.dim() < LATENT_DIMS or cache.shape[0] % blocks:
            raise InvalidInput("kv cache", f"page {_shape_of(cache)}", "report this to OwnerServe")
        if name == MLA:
            return _latent(_by_kernel_block(cache, blocks), at, group)
        if name in (CONV, RECURRENT):
            # One page holds both, packed: the convolution first.
            conv = self._shape.components[CONV].section
            offset = conv.payload_bytes // conv.layers if name == RECURRENT else 0
            is_swapped = name in self._transposed
            return _state(cache, at, group, offset=offset, is_swapped=is_swapped)
        order = self._key_orders[WINDOW if name == LEAD else name]
        return _attention(_by_kernel_block(cache, blocks), at, group, order=order)

    def _row(self, name: str, row: PageRun, caches: Mapping[str, Any]) -> Series:
        holes, at = [], 0
        for page in row.pages:
            held = _held_bytes(caches[page.layer], page.layer, page.offset, self._num_blocks)
            if held > page.bytes:
                raise InvalidInput(
                    "kv cache",
                    f"a page of {page.layer} is not in one piece",
                    "set VLLM_KV_CACHE_LAYOUT=LBHNC, or use an unquantised KV cache",
                )
            if held < page.bytes:
                holes.append(slice(at + held, at + page.bytes))
            at += page.bytes
        first = caches[row.pages[0].layer]
        memory = torch.empty(0, dtype=torch.uint8, device=first.device)
        memory.set_(first.untyped_storage())
        view = memory.as_strided((self._num_blocks, 1, 1, at), (row.stride, at, at, 1), row.offset)
        block_tokens = self._shape.components[name].block_tokens[row.group]
        return Series(view, row.group, block_tokens, tuple(holes))

    def size(self, place: BlockPlace) -> int:
        """Return the bytes of a place's payload."""
        return self._units(place) * self._shape.components[place.component].section.unit_bytes

    def cut(
        self, place: BlockPlace, data: memoryview, *, most_bytes: int
    ) -> Iterator[tuple[BlockPlace, memoryview]]:
        """Yield the place in parts of about `most_bytes`, whole units each, with what of its
        payload `data` belongs to each; in one part where a device copies by itself, or where units
        begin inside of blocks (a lead's). Raises SpecMismatch when `data` has another length."""
        units, size = self._units(place), self._check_size(place, data)
        each = max(1, most_bytes * units // size)
        is_whole = place.component == LEAD or isinstance(self._copies, DeviceCopies)
        if each >= units or is_whole:
            yield place, data
            return
        tokens, unit_bytes = (place.end - place.start) // units, size // units
        for first in range(0, units, each):
            end = min(first + each, units)
            blocks = tuple(
                ids[first * len(ids) // units : end * len(ids) // units] for ids in place.blocks
            )
            at = place.start + first * tokens, place.start + end * tokens
            yield (
                BlockPlace(place.component, blocks, *at),
                data[first * unit_bytes : end * unit_bytes],
            )

    def read(self, place: BlockPlace, into: memoryview) -> None:
        """Copy the place's payload into `into`, which has its size. On a device the copies may
        still be queued on the current stream."""
        if self._has_gaps(place):
            np.frombuffer(into, np.uint8)[:] = 0
        for pieces in self._pieces(place):
            self._copies.gather(pieces, into)
        if place.component in self._with_holes:
            self._copies.settle()
            self._fill_holes(place, torch.frombuffer(into, dtype=torch.uint8))

    def write(self, place: BlockPlace, data: memoryview) -> None:
        """Copy the payload `data` to the place, but for blocks that are not to be written. On a
        device `data` is needed until the current stream is done. Raises SpecMismatch when `data`
        has another length."""
        self._check_size(place, data)
        for pieces in self._pieces(place):
            self._copies.scatter(pieces, data)

    def _check_size(self, place: BlockPlace, data: memoryview) -> int:
        size = self.size(place)
        if len(data) != size:
            raise SpecMismatch(f"{len(data)} bytes for {size} of {place.component}")
        return size

    # -- pieces --------------------------------------------------------------------------------

    def _lanes_of(self, name: str) -> tuple[Lanes, ...]:
        at = self._shape.components[name]
        by_form: dict[Any, list[tuple[Lane, int, Series]]] = {}
        for layers, starts in zip(self._parts[name], at.section.offsets(), strict=True):
            for series, offset in zip(layers, starts, strict=True):
                lane = series.lane()
                reach = at.reaches[series.group] if at.reaches else 0
                memory = series.view.untyped_storage().data_ptr()
                key = (memory, *msgspec.structs.astuple(lane)[1:], series.block_tokens, reach)
                by_form.setdefault(key, []).append((lane, offset, series))
        return tuple(self._alike(name, own) for own in by_form.values())

    def _alike(self, name: str, own: Sequence[tuple[Lane, int, Series]]) -> Lanes:
        lane, _, series = own[0]
        section, piece = self._shape.components[name].section, lane
        steps = [lane.block_bytes, section.unit_bytes]
        if name in BY_ROW:
            counts, strides = lane.counts[2:], lane.strides[2:]
            piece = msgspec.structs.replace(lane, counts=counts, strides=strides)
            steps += lane.strides[:2]
        begins, offsets = [lane.address for lane, _, _ in own], [offset for _, offset, _ in own]
        base, groups = min(begins), [series.group for _, _, series in own]
        tables = tuple(dict.fromkeys(groups))
        end = max(begins) + (self._num_blocks - 1) * lane.block_bytes + lane.span_bytes
        grid = math.gcd(piece.bytes, *steps, *offsets, *(begin - base for begin in begins))
        return Lanes(
            lane,
            Form(piece, range(base, end), grid=grid),
            begins=np.array(begins, np.int64),
            offsets=np.array(offsets, np.int64),
            tables=tables,
            which=np.array([tables.index(group) for group in groups], np.int64),
            fresh=_first_in_page(begins),
            block_tokens=series.block_tokens,
        )

    def _pieces(self, place: BlockPlace) -> Iterator[Pieces]:
        """Yield what there is to copy of a place, as lists of pieces of one form."""
        ids = [np.array(blocks, np.int64) for blocks in place.blocks]
        for lanes in self._lanes[place.component]:
            if place.component in BY_ROW:
                blocks, own, frame = self._window(lanes, place, ids)
            else:
                blocks, own, frame = self._blocks(lanes, place, ids)
            fresh = None
            if place.component not in BY_ROW and _are_scattered(ids):
                fresh = np.broadcast_to(lanes.fresh[:, None], blocks.shape)
            ours = blocks >= 0  # others are not ours to write: another request may be reading them
            if not ours.all():
                own, frame = own[ours], frame[ours]
                fresh = fresh[ours] if fresh is not None else None
            if own.size:
                fresh = fresh.reshape(-1) if fresh is not None else None
                yield Pieces(lanes.form, own.reshape(-1), frame.reshape(-1), fresh)

    def _blocks(
        self, lanes: Lanes, place: BlockPlace, ids: Sequence[Offsets]
    ) -> tuple[Offsets, Offsets, Offsets]:
        """Return the blocks of a place, where they are and where in the frame, each as [units,
        lanes, blocks of a unit]."""
        units, size = self._units(place), lanes.form.piece_bytes
        tables = np.stack([ids[group].reshape(units, -1) for group in lanes.tables], axis=1)
        blocks = tables[:, lanes.which]
        count = blocks.shape[2]
        first = 0
        if place.component == WINDOW_PAGES:
            # The last block before the boundary is the last of the unit, however few there are.
            whole = self._shape.components[place.component].reaches[lanes.tables[0]]
            first = whole // lanes.block_tokens - count
        own = lanes.begins[:, None] + blocks * lanes.lane.block_bytes
        unit_bytes = self._shape.components[place.component].section.unit_bytes
        frame = (
            (np.arange(units) * unit_bytes)[:, None, None]
            + lanes.offsets[:, None]
            + (first + np.arange(count)) * size
        )
        return blocks, own, frame

    def _window(
        self, lanes: Lanes, place: BlockPlace, ids: Sequence[Offsets]
    ) -> tuple[Offsets, Offsets, Offsets]:
        """Return the block of each of a window's tokens, where its row is and where in the frame,
        each as [lanes, tokens], in the order of the ring. Rows of a lead follow one another."""
        size = lanes.block_tokens
        tokens = np.arange(place.start, place.end)
        if place.component == LEAD:
            units, within = np.divmod(tokens - place.start, self._shape.payload.block_tokens)
            unit_bytes = self._shape.components[LEAD].section.unit_bytes
            in_frame = units * unit_bytes + within * lanes.form.piece_bytes
        else:
            ring = tokens % (self._shape.payload.window_tokens - 1)
            order = np.argsort(ring)
            tokens, in_frame = tokens[order], ring[order] * lanes.form.piece_bytes
        inside = tokens - place.start // size * size
        blocks = np.stack([ids[group][inside // size] for group in lanes.tables])[lanes.which]
        own = lanes.at_tokens(blocks, inside % size)
        return blocks, own, lanes.offsets[:, None] + in_frame

    # -- parts ---------------------------------------------------------------------------------

    def _units(self, place: BlockPlace) -> int:
        if self._shape.components[place.component].section.coverage is Coverage.RANGE:
            return -(-(place.end - place.start) // self._shape.payload.block_tokens)
        return 1

    def _has_gaps(self, place: BlockPlace) -> bool:
        """Return whether something of the unit is not written: padding, or rows of a short
        window."""
        at = self._shape.components[place.component]
        short = place.component == WINDOW and (
            place.end - place.start < self._shape.payload.window_tokens - 1
        )
        # Of pages kept as bytes: fewer blocks than a unit has, at the beginning or in a chunk.
        short |= any(
            len(ids) * size < reach
            for ids, size, reach in zip(place.blocks, at.block_tokens, at.reaches, strict=False)
        )
        return short or at.section.unit_bytes != at.section.payload_bytes

    def _fill_holes(self, place: BlockPlace, frame: Tensor) -> None:
        """Write zeros where a block holds bytes of no layer of its group: what is left there of its
        former holders is nobody's to keep."""
        at = self._shape.components[place.component].section
        units = frame.view(self._units(place), -1)
        offsets = zip(at.parts, at.offsets(), self._parts[place.component], strict=True)
        for part, starts, layers in offsets:
            size = part.payload_bytes // part.shape[0]
            for start, series in zip(starts, layers, strict=True):
                blocks = units[:, start : start + size].view(len(units), *part.shape[1:])
                for hole in series.holes:
                    blocks[..., hole] = 0


def _first_in_page(begins: Sequence[int]) -> NDArray[np.bool_]:
    """Return which begins are the first in their page of memory: a layer's values begin in the page
    of its keys."""
    pages = np.array(begins, np.int64) // PAGE_BYTES
    firsts = np.unique(pages, return_index=True)[1]
    return np.isin(np.arange(len(pages)), firsts)


def _are_scattered(ids: Sequence[Offsets]) -> bool:
    """Return whether most of a place's blocks do not follow one another."""
    breaks = sum(int(np.count_nonzero(np.diff(blocks) != 1)) for blocks in ids)
    return 2 * breaks > sum(map(len, ids))


def _by_kernel_block(cache: Tensor, blocks: int) -> Tensor:
    """Return a page as [blocks, n, ...]: vLLM may have cut a block of it into n kernel blocks."""
    return cache.view(blocks, -1, *cache.shape[1:])


def _held_bytes(cache: Any, layer: str, offset: int, blocks: int) -> int:
    """Return how many bytes of a block, from `offset` on, a layer's view [blocks, ...] covers.
    Raises InvalidInput where the view begins elsewhere."""
    ok = isinstance(cache, Tensor) and cache.shape[0] % blocks == 0
    item = cache.element_size() if ok else 0
    if not ok or cache.storage_offset() * item != offset:
        raise InvalidInput("kv cache", f"{layer} lies elsewhere", "report this to OwnerServe")
    kernel_blocks = cache.shape[0] // blocks  # vLLM may have cut a block of one dense page
    lengths = (kernel_blocks, *cache.shape[1:])
    axes = zip(lengths, cache.stride(), strict=True)
    return int(item * (1 + sum((length - 1) * stride for length, stride in axes)))


def _check_type(cache: Tensor, part: PayloadPart) -> None:
    if cache.dtype != _torch_dtype(part):
        raise InvalidInput("kv cache", f"page of {cache.dtype}", f"expected {part.dtype}")


def _attention(
    cache: Tensor, at: ComponentMap, group: int, *, order: Sequence[int] | None
) -> tuple[Series, Series]:
    """Return the keys and values of one layer's page, [blocks, n, heads, tokens / n, ...]."""
    num_blocks, kernel_blocks = cache.shape[:2]
    tokens, rows = at.block_tokens[group], at.block_tokens[group] // kernel_blocks
    heads, dim = at.section.parts[0].shape[-2:]
    _check_type(cache, at.section.parts[0])
    if kernel_blocks * rows != tokens or cache.shape[2:] != (heads, rows, 2 * dim):
        expected = f"expected [{heads}, {rows}, {2 * dim}] in {kernel_blocks} kernel blocks"
        raise InvalidInput("kv cache", f"page of {_shape_of(cache)}", expected)
    if order is None:
        by_token = cache.transpose(2, 3)
        keys, values = by_token[..., :dim], by_token[..., dim:]
        return Series(keys, group, tokens), Series(values, group, tokens)
    if kernel_blocks > 1:
        raise InvalidInput(
            "kv cache", f"{kernel_blocks} kernel blocks on a CPU", "use its block size"
        )
    rows = _tile(order, tokens, dim)
    halves = cache.view(num_blocks, heads, 2, tokens * dim).unbind(2)
    keys = halves[0].view(num_blocks, heads, tokens // rows, dim, rows).permute(0, 2, 4, 1, 3)
    values = halves[1].view(num_blocks, heads, tokens // rows, rows, dim).permute(0, 2, 3, 1, 4)
    return Series(keys, group, tokens), Series(values, group, tokens)


def _tile(order: Sequence[int], tokens: int, dim: int) -> int:
    """Return the tile length n such that a block's keys lie as [tokens / n, dim, n]. Raises
    InvalidInput where there is none."""
    found = torch.tensor(order)
    plain = torch.arange(tokens * dim)
    for rows in range(tokens, 0, -1):
        if tokens % rows == 0:
            tiled = plain.view(tokens // rows, rows, dim).transpose(1, 2).reshape(-1)
            if torch.equal(tiled, found):
                return rows
    raise InvalidInput("kv cache", "keys lie in an unknown order", "use float32 on this CPU")


def _latent(cache: Tensor, at: ComponentMap, group: int) -> tuple[Series]:
    """Return the one part of a latent page, [blocks, n, 1, tokens / n, dim] or without the 1."""
    page = cache if cache.dim() == LATENT_DIMS + 1 else cache[:, :, 0]
    tokens, dim = at.block_tokens[group], at.section.parts[0].shape[-1]
    _check_type(cache, at.section.parts[0])
    kernel_blocks, rows, width = page.shape[1:]
    if (kernel_blocks * rows, width) != (tokens, dim):
        raise InvalidInput("kv cache", f"page {_shape_of(page)}", f"expected [{tokens}, {dim}]")
    return (Series(page, group, tokens),)


def _state(
    cache: Tensor, at: ComponentMap, group: int, *, offset: int, is_swapped: bool
) -> tuple[Series]:
    """Return one state of a recurrent layer's page of bytes, [blocks, 1, 1, bytes]."""
    part = at.section.parts[0]
    count, shape = part.payload_bytes // at.section.layers, part.shape[1:]
    pages = cache.squeeze(dim=(1, 2))
    if cache.dtype != torch.int8 or pages.dim() != 2 or pages.shape[-1] < offset + count:
        raise InvalidInput("kv cache", f"page {_shape_of(cache)}", f"expected {offset + count} B")
    data = pages[:, offset : offset + count].view(_torch_dtype(part))
    lies = (*shape[:-2], shape[-1], shape[-2]) if is_swapped else shape
    state = data.view(-1, *lies)
    state = state.transpose(-1, -2) if is_swapped else state
    return (Series(state[:, None, None], group, at.block_tokens[group]),)


def _torch_dtype(part: PayloadPart) -> torch.dtype:
    dtype = getattr(torch, part.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _shape_of(cache: Any) -> str:
    return str(list(getattr(cache, "shape", ())))
