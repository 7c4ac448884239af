"""The codec copies between vLLM's pages and the canonical payload. Owns no memory and no block.

    page of a layer   [blocks, heads, tokens, keys | values]       logical, whatever lies beneath
    on a CPU          [blocks, heads, keys of all tokens, then values], keys in the kernel's order
    payload           kv.frame: [layers, tokens, heads, dim], keys and values apart
    pages as bytes    rows of `packed`, [blocks, bytes of the pages that touch]

Every layer, or row, gets strided views of its page once; a copy is then plain tensor copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ownerserve.engines.vllm.layout.packed import PageRun
from ownerserve.engines.vllm.layout.shape import ComponentMap, StateShape
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import CONV, MLA, RECURRENT, WINDOW, WINDOW_PAGES, PayloadPart
from ownerserve.kv.specs import Coverage

Piece = tuple[Tensor, tuple[Tensor, Any], Any]
"""A piece of the payload; the view it is of, with blocks or rows in it; rows of the piece."""


LATENT_DIMS = 3


class Series(msgspec.Struct, frozen=True):
    """A `Series` is one part of one layer as [blocks, tiles, rows, ...]: token t of a block is row
    t % rows of tile t // rows. `holes` are bytes of the last axis that belong to no layer."""

    view: Tensor
    group: int
    block_tokens: int
    holes: tuple[slice, ...] = ()

    @property
    def rows(self) -> int:
        return self.view.shape[2]


class PageCodec:
    """A `PageCodec` reads and writes places. Thread-safe: it only makes views."""

    def __init__(
        self,
        shape: StateShape,
        caches: Mapping[str, Any],
        *,
        num_blocks: int,
        key_orders: Mapping[str, Sequence[int] | None],
        transposed: Collection[str] = (),
    ) -> None:
        """Make the views of `caches`. `key_orders` says, by component, how a block's keys lie
        (compat.cpu_key_order). Raises InvalidInput for pages of another form.

        `transposed`: components whose state lies with its last two axes swapped.
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

    def _series(self, name: str, cache: Any, group: int) -> tuple[Series, ...]:
        at, blocks = self._shape.components[name], self._num_blocks
        if not isinstance(cache, Tensor) or cache.shape[0] != blocks:
            raise InvalidInput("kv cache", f"page {_shape_of(cache)}", "use the default block size")
        if name == MLA:
            return _latent(cache, at, group)
        if name in (CONV, RECURRENT):
            # One page holds both, packed: the convolution first.
            conv = self._shape.components[CONV].section
            offset = conv.payload_bytes // conv.layers if name == RECURRENT else 0
            return _state(cache, at, group, offset=offset, is_swapped=name in self._transposed)
        return _attention(cache, at, group, order=self._key_orders[name])

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

    def read(self, place: BlockPlace, into: memoryview) -> None:
        """Copy the place's payload into `into`, which has its size."""
        units = torch.frombuffer(into, dtype=torch.uint8).view(self._units(place), -1)
        if self._has_gaps(place):
            units.zero_()
        for piece, (view, at), rows in self._pairs(place, units):
            if rows is None:
                for first, block, count in _runs(at):
                    piece[first : first + count].copy_(view[block : block + count])
            else:
                piece[rows] = view[at].to(piece.device)
        if self._shape.components[place.component].rows:
            self._fill_holes(place, units)

    def write(self, place: BlockPlace, data: memoryview) -> None:
        """Copy the payload `data` to the place, but for blocks that are not to be written. Raises
        SpecMismatch when `data` has another length."""
        if len(data) != self.size(place):
            raise SpecMismatch(f"{len(data)} bytes for {self.size(place)} of {place.component}")
        units = _readable(data).view(self._units(place), -1)
        for piece, (view, at), rows in self._pairs(place, units):
            if rows is None:
                for first, block, count in _runs(at):
                    if block < 0:
                        continue  # not ours to write: another request may be reading it
                    view[block : block + count].copy_(piece[first : first + count])
            else:
                view[at] = piece[rows].to(view.device)

    # -- parts ---------------------------------------------------------------------------------

    def _units(self, place: BlockPlace) -> int:
        if self._shape.components[place.component].section.coverage is Coverage.RANGE:
            return (place.end - place.start) // self._shape.payload.block_tokens
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

    def _fill_holes(self, place: BlockPlace, units: Tensor) -> None:
        """Write zeros where a block holds bytes of no layer of its group: what is left there of its
        former holders is nobody's to keep."""
        for piece, series in self._typed(place, units):
            for hole in series.holes:
                piece[..., hole].zero_()

    def _pairs(self, place: BlockPlace, units: Tensor) -> Iterator[Piece]:
        """Yield, for every part and layer, its piece of the payload, where that lies, and, when
        rows are addressed one by one, which rows of the piece."""
        for piece, series in self._typed(place, units):
            yield from self._pieces(place, piece, series)

    def _typed(self, place: BlockPlace, units: Tensor) -> Iterator[tuple[Tensor, Series]]:
        """Yield every part's every layer: its piece of the payload, [units, ...], and where it
        lies."""
        section = self._shape.components[place.component].section
        offset = 0
        for part, layers in zip(section.parts, self._parts[place.component], strict=True):
            data = units[:, offset : offset + part.payload_bytes]
            offset += part.padded_bytes
            typed = data.view(_torch_dtype(part)).view(len(units), *part.shape)
            for layer, series in enumerate(layers):
                yield typed[:, layer], series

    def _pieces(self, place: BlockPlace, piece: Tensor, series: Series) -> Iterator[Piece]:
        ids = place.blocks[series.group]
        if place.component in (CONV, RECURRENT):
            yield piece, (series.view[:, 0, 0], ids), None
        elif place.component == WINDOW_PAGES:
            # The last block before the boundary is the last of the unit, however few there are.
            yield piece[0, piece.shape[1] - len(ids) :], (series.view[:, 0, 0], ids), None
        elif place.component == WINDOW:
            positions = torch.arange(place.start, place.end)
            inside = positions - place.start // series.block_tokens * series.block_tokens
            blocks = torch.tensor(ids)[inside // series.block_tokens]
            tokens = inside % series.block_tokens
            at = (blocks, tokens // series.rows, tokens % series.rows)
            ring = positions % (self._shape.payload.window_tokens - 1)
            yield piece[0], (series.view, at), ring
        else:
            units, count = len(piece), len(ids) // len(piece)
            tiles, rows = series.view.shape[1:3]
            blocks = piece.view(units, count, tiles, rows, *piece.shape[2:])
            if count == 1:
                yield blocks[:, 0], (series.view, ids), None
                return
            for unit in range(units):  # blocks of two units don't touch in the payload
                yield blocks[unit], (series.view, ids[unit * count : (unit + 1) * count]), None


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
    """Return the keys and values of one layer's page."""
    num_blocks, tokens = cache.shape[0], at.block_tokens[group]
    heads, dim = at.section.parts[0].shape[-2:]
    _check_type(cache, at.section.parts[0])
    if cache.shape[1:] != (heads, tokens, 2 * dim):
        raise InvalidInput(
            "kv cache", f"page of {_shape_of(cache)}", f"expected [{heads}, {tokens}, {2 * dim}]"
        )
    if order is None:
        by_token = cache.transpose(1, 2).unsqueeze(1)
        keys, values = by_token[..., :dim], by_token[..., dim:]
        return Series(keys, group, tokens), Series(values, group, tokens)
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
    """Return the one part of a latent page, [blocks, 1, tokens, dim] or [blocks, tokens, dim]."""
    page = cache if cache.dim() == LATENT_DIMS else cache[:, 0]
    tokens, dim = at.block_tokens[group], at.section.parts[0].shape[-1]
    _check_type(cache, at.section.parts[0])
    if page.shape[1:] != (tokens, dim):
        raise InvalidInput("kv cache", f"page {_shape_of(page)}", f"expected [{tokens}, {dim}]")
    return (Series(page.unsqueeze(1), group, tokens),)


def _state(
    cache: Tensor, at: ComponentMap, group: int, *, offset: int, is_swapped: bool
) -> tuple[Series]:
    """Return one state of a recurrent layer's page of bytes, [blocks, 1, 1, bytes]."""
    part = at.section.parts[0]
    count, shape = part.payload_bytes // at.section.layers, part.shape[1:]
    pages = cache.squeeze(dim=(1, 2))
    if cache.dtype != torch.int8 or pages.shape[-1] < offset + count:
        raise InvalidInput("kv cache", f"page {_shape_of(cache)}", f"expected {offset + count} B")
    data = pages[:, offset : offset + count].view(_torch_dtype(part))
    lies = (*shape[:-2], shape[-1], shape[-2]) if is_swapped else shape
    state = data.view(-1, *lies)
    state = state.transpose(-1, -2) if is_swapped else state
    return (Series(state[:, None, None], group, at.block_tokens[group]),)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first index, first block, count) of every run of blocks that follow one another."""
    first = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield first, ids[first], index - first
            first = index


def _torch_dtype(part: PayloadPart) -> torch.dtype:
    dtype = getattr(torch, part.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


class _Unlocked:
    """An `_Unlocked` is an array that torch takes although its memory is read-only: torch has no
    such tensors."""

    def __init__(self, data: memoryview) -> None:
        self._array = np.frombuffer(data, np.uint8)
        address, _ = self._array.__array_interface__["data"]
        self.__array_interface__ = {**self._array.__array_interface__, "data": (address, False)}


def _readable(data: memoryview) -> Tensor:
    """Return `data` as a tensor of bytes, not copied. They belong to the store: nobody may write
    into them."""
    return torch.from_numpy(np.asarray(_Unlocked(data)))


def _shape_of(cache: Any) -> str:
    return str(list(getattr(cache, "shape", ())))
