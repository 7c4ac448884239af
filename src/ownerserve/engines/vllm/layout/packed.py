"""Pages that no canonical payload describes are kept as plain bytes inside vLLM's blocks.

    a block of a group   | layer 0's page | layer 1's | ... | bytes of no layer |   block-outermost
    row                  | as many pages as stand side by side                  |
    pages                rows of full attention, of the blocks of B tokens
    window_pages         rows of windows and chunks, of the last blocks that one reaches back into;
                         of recurrent state its last block

Scales inside a page, several tokens in one state, an indexer's keys, a compressor's states: what
such bytes mean is between vLLM and its kernels. They are kept as they are, under a name that says
whose they are (`meaning`). Pure, and of vLLM reads only what scheduler and workers both know: of a
group of unlike layers the scheduler has one layer's spec, but every layer's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ownerserve.kv.errors import InvalidInput

FACTS = (
    "block_size",
    "sliding_window",
    "tokens_per_state",
    "model_version",
    "cache_dtype_str",
    "cache_role",
    "dtype",
    "kv_quant_mode",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "state_content_bytes",
    "alignment",
)
"""What of a spec says how its page is to be read."""
FACTS_IF_ANY = ("attention_chunk_size", "shapes", "dtypes", "mamba_type", "mamba_cache_mode")
"""The same of specs that have them."""


class LayerPages(msgspec.Struct, frozen=True):
    """`LayerPages` are one layer's bytes in every block: `offset` in block 0, `stride` from block
    to block."""

    layer: str
    offset: int
    bytes: int
    stride: int


class PageRun(msgspec.Struct, frozen=True):
    """A `PageRun` is pages of one group without anything between them. `group` counts the
    component's groups, `blocks` are the group's in a unit of the payload."""

    group: int
    blocks: int
    pages: tuple[LayerPages, ...]

    @property
    def offset(self) -> int:
        """Return the first page's offset in block 0, in bytes."""
        return self.pages[0].offset

    @property
    def stride(self) -> int:
        """Return the bytes from a block to the next."""
        return self.pages[0].stride

    @property
    def bytes(self) -> int:
        """Return the bytes of all its pages in one block."""
        return sum(page.bytes for page in self.pages)


def pages_of(kv_cache_config: Any) -> dict[str, LayerPages]:
    """Return every layer's pages, by layer name, from the places that vLLM gave them."""
    pages = {}
    for tensor in getattr(kv_cache_config, "kv_cache_tensors", ()):
        # Of the two strides the longer one leads to the next block or over all of them.
        size = min(int(tensor.layer_stride), int(tensor.block_stride))
        for index, name in enumerate(tensor.layers):
            offset = int(tensor.offset) + index * int(tensor.layer_stride)
            pages[name] = LayerPages(name, offset, size, int(tensor.block_stride))
    return pages


def is_mixed(pages: dict[str, LayerPages], names: Iterable[str]) -> bool:
    """Return whether layers of a group have pages of several sizes: one spec can't describe
    them."""
    return len({pages[name].bytes for name in names if name in pages}) > 1


def rows_of(
    pages: dict[str, LayerPages], names: Sequence[str], *, group: int, blocks: int
) -> tuple[PageRun, ...]:
    """Return a group's pages, those that touch in one row: a copy of a row costs what one page's
    does. Raises InvalidInput for a layer without a place."""
    missing = [name for name in names if name not in pages]
    if missing:
        raise InvalidInput("kv cache", f"no place for {missing[0]}", "report this to OwnerServe")
    runs: list[list[LayerPages]] = []
    for page in sorted((pages[name] for name in names), key=lambda page: page.offset):
        last = runs[-1][-1] if runs else None
        if last and (last.offset + last.bytes, last.stride) == (page.offset, page.stride):
            runs[-1].append(page)
        else:
            runs.append([page])
    return tuple(PageRun(group, blocks, tuple(run)) for run in runs)


def meaning(spec: Any, names: Sequence[str], *, packed_by: str) -> str:
    """Return what a group's bytes are, as an identity takes it. `packed_by` is
    compat.packed_by's."""
    facts = {name: str(getattr(spec, name, None)) for name in FACTS}
    facts |= {name: str(value) for name in FACTS_IF_ANY if (value := getattr(spec, name, None))}
    kind = type(spec).__name__
    return msgspec.json.encode(["packed", packed_by, kind, facts, list(names)]).decode()
