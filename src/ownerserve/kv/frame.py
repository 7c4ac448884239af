"""The canonical frame says which bytes stand for a model's state, whatever engine computed them.

A stored record is one unit of bytes for each slot of one component:

    unit of a section   | part 0, padded to 16 bytes | part 1 | ...
    part                one array, C order, little-endian; its first axis counts the layers

    dense      keys, values   [layers, B, heads, dim]          keys rotated, as attention reads them
    swa        keys, values   [layers, W - 1, heads, dim]      a ring: position p in row p mod (W-1)
    mla        latent         [layers, B, rank + rope dim]
    conv       columns        [layers, channels, kernel - 1]   oldest first
    recurrent  state          [layers, heads, key dim, value dim]
    swa_lead   keys, values   [layers, B, heads, dim]          rows before a window, in order
    csa_main, csa_index, csa_overlap, hca: DeepSeek-V4's, as engines.hf.state shapes them
    pages, window_pages            [rows, blocks, bytes]   one engine's own bytes, for it alone

Rows that no token has reached are zero. Two engines that agree on `payload_digest` (and on the rest
of an Identity) read each other's records. No engine knows another's pages: each one says
where its own memory has what the frame has, by a `Lane` for each part of each layer, and copies by
that. The hf engine's slots have the frame's bytes as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.specs import Coverage, LayerSpec, Role

FORMAT = "payload/1"
"""Names this layout in a record's descriptor. A new number when it changes."""
PART_ALIGN_BYTES = 16

DENSE, WINDOW, MLA, CONV, RECURRENT = "dense", "swa", "mla", "conv", "recurrent"
CSA_MAIN, CSA_INDEX, CSA_OVERLAP, HCA = "csa_main", "csa_index", "csa_overlap", "hca"
PAGES, WINDOW_PAGES = "pages", "window_pages"
LEAD = "swa_lead"
"""Beside a model's sections and in no digest: what it adds to a point is optional."""
COVERAGE_OF = {
    DENSE: Coverage.RANGE,
    MLA: Coverage.RANGE,
    CSA_MAIN: Coverage.RANGE,
    CSA_INDEX: Coverage.RANGE,
    HCA: Coverage.RANGE,
    PAGES: Coverage.RANGE,
    WINDOW: Coverage.POINT,
    CSA_OVERLAP: Coverage.POINT,
    CONV: Coverage.POINT,
    RECURRENT: Coverage.POINT,
    WINDOW_PAGES: Coverage.POINT,
    LEAD: Coverage.RANGE,
}
SECTION_OF = {
    Role.DENSE: DENSE,
    Role.SWA: WINDOW,
    Role.MLA_LATENT: MLA,
    Role.CSA_MAIN: CSA_MAIN,
    Role.CSA_INDEX: CSA_INDEX,
    Role.CSA_TAIL: CSA_OVERLAP,
    Role.CSA_INDEX_TAIL: CSA_OVERLAP,
    Role.HCA: HCA,
    Role.CONV: CONV,
    Role.RECURRENT: RECURRENT,
}
"""The section in which state of a role is kept, in the order in which a layer's sections come. An
indexer's keys (`index`) have none, and an HCA tail is empty at a boundary."""
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


def sections_of(layer: LayerSpec) -> tuple[str, ...]:
    """Return the sections in which a layer's state is kept."""
    roles = {state.role for state in layer.states}
    return tuple(dict.fromkeys(name for role, name in SECTION_OF.items() if role in roles))


class PayloadPart(msgspec.Struct, frozen=True):
    """A part is one array of a section. `dtype` is its name without a library's prefix: float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the array; raises InvalidInput for an unknown `dtype`."""
        size = ITEM_BYTES.get(self.dtype)
        if size is None:
            raise InvalidInput("dtype", f"{self.dtype!r}", f"use one of {', '.join(ITEM_BYTES)}")
        return math.prod(self.shape) * size

    @property
    def padded_bytes(self) -> int:
        """Return the bytes of the array with its padding."""
        return -(-self.payload_bytes // PART_ALIGN_BYTES) * PART_ALIGN_BYTES


class PayloadSection(msgspec.Struct, frozen=True):
    """A section is one component: its parts in the order in which they lie in a unit."""

    name: str
    parts: tuple[PayloadPart, ...]

    @property
    def unit_bytes(self) -> int:
        """Return the bytes that the section takes in a unit, padding included."""
        return sum(part.padded_bytes for part in self.parts)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the section's arrays in a unit, without padding."""
        return sum(part.payload_bytes for part in self.parts)

    @property
    def coverage(self) -> Coverage:
        """Return whether the section is range state or point state."""
        return COVERAGE_OF[self.name]

    @property
    def layers(self) -> int:
        """Count the layers that the section has."""
        return self.parts[0].shape[0]

    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Return where each part's each layer begins in a unit, in bytes."""
        found, at = [], 0
        for part in self.parts:
            layers = part.shape[0]
            found.append(tuple(at + n * (part.payload_bytes // layers) for n in range(layers)))
            at += part.padded_bytes
        return tuple(found)


class Lane(msgspec.Struct, frozen=True):
    """A `Lane` is where an engine keeps one part of one layer.

    block b of the part    begins at address + b * block_bytes
    inside a block         counts: the axes as they follow one another in the frame; strides: bytes
                           from one to the next in the engine's memory; an axis may be cut in two

    `address` is a place in memory and not in the frame; `item_bytes` is the size of a scalar.
    """

    address: int
    block_bytes: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Return the bytes of one block of the part."""
        return math.prod(self.counts) * self.item_bytes

    @property
    def span_bytes(self) -> int:
        """Return the bytes from the first to the last that a block of the part touches."""
        axes = zip(self.counts, self.strides, strict=True)
        return self.item_bytes + sum((count - 1) * stride for count, stride in axes)

    @property
    def reach(self) -> tuple[int, int]:
        """Return the first byte that a block of the part touches and the one after the last, from
        where the block begins: with strides below zero the first is below it."""
        steps = [
            (count - 1) * stride for count, stride in zip(self.counts, self.strides, strict=True)
        ]
        low, high = (sum(end(step, 0) for step in steps) for end in (min, max))
        return low, high + self.item_bytes

    def rows(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return a block of the part as rows that lie in one piece on both sides: the axes that
        count them, each as (count, stride), and the bytes of a row."""
        axes = [axis for axis in zip(self.counts, self.strides, strict=True) if axis[0] > 1]
        row_bytes = self.item_bytes
        while axes and axes[-1][1] == row_bytes:
            row_bytes *= axes.pop()[0]
        return tuple(axes), row_bytes


class Payload(msgspec.Struct, frozen=True):
    """A payload is all sections of a model at one block length, in the order its layers first need
    them.

    `kinds` names every layer's attention, first to last, as transformers' `layer_types` does.
    `window_tokens` is W, 0 without sliding-window layers.
    """

    block_tokens: int
    kinds: tuple[str, ...]
    sections: tuple[PayloadSection, ...]
    window_tokens: int = 0

    def section(self, name: str) -> PayloadSection:
        """Return the section of that name; raises StopIteration when there is none."""
        return next(section for section in self.sections if section.name == name)

    def digest(self) -> bytes:
        """Return what `Identity.spec_digest` is for this payload."""
        return payload_digest(
            self.kinds,
            self.sections,
            block_tokens=self.block_tokens,
            window_tokens=self.window_tokens,
        )


def payload_digest(
    kinds: Sequence[str],
    sections: Sequence[PayloadSection],
    *,
    block_tokens: int,
    window_tokens: int,
    rates: tuple[int, int] = (0, 0),
) -> bytes:
    """Return the SHA-256 over what state means: kinds of layers and each section's arrays.

    `rates` are the compression ratios of the layers that compress (CSA, HCA).
    """
    ranges_first = sorted(sections, key=lambda s: s.coverage is Coverage.POINT)
    arrays = [
        [s.name, [[p.name, list(p.shape), f"torch.{p.dtype}"] for p in s.parts]]
        for s in ranges_first
    ]
    facts = [list(kinds), arrays, block_tokens, window_tokens]
    return hashlib.sha256(msgspec.json.encode([facts, list(rates)])).digest()
