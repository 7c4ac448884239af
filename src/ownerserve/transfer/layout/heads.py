"""Heads are the axis along which tensor parallelism cuts state: this module cuts lanes there.

    part    [layers, B, heads, dim]     of a rank: its own heads, counted from 0
    cut     [layers, B, h1 - h0, dim]   the same blocks, fewer bytes of each

Which axis of a part counts heads is the section's. Sections that every rank has whole (MLA,
compressed entries) have none, nor has a convolution, whose channels are of queries, keys and
values.
"""

from __future__ import annotations

import math

import msgspec

from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import (
    CSA_INDEX,
    CSA_MAIN,
    CSA_OVERLAP,
    DENSE,
    HCA,
    LEAD,
    MLA,
    RECURRENT,
    WINDOW,
    Lane,
    PayloadPart,
    PayloadSection,
)
from ownerserve.kv.regions import Region

HEAD_AXIS = {DENSE: 2, WINDOW: 2, LEAD: 2, RECURRENT: 1}
"""Which axis of a part's shape counts heads, by section."""
ON_EVERY_RANK = frozenset({MLA, CSA_MAIN, CSA_INDEX, CSA_OVERLAP, HCA})
"""Sections of which every rank of a tensor parallel group has all."""


def heads_of(section: PayloadSection) -> int:
    """Count the heads of a section; 0 where it is not cut by heads."""
    axis = HEAD_AXIS.get(section.name)
    return section.parts[0].shape[axis] if axis is not None else 0


def with_heads(region: Region, heads: range) -> Region:
    """Return the region as if its blocks held these heads only. Raises InvalidInput for heads that
    it has not, SpecMismatch where a lane can't be cut there."""
    section = region.section
    axis, count = HEAD_AXIS.get(section.name), heads_of(section)
    if axis is None or not 0 <= heads.start < heads.stop <= count:
        problem = f"[{heads.start}, {heads.stop}) of {count} in {section.name}"
        raise InvalidInput("heads", problem, "ask for heads that the component has")
    lanes = tuple(
        tuple(_cut(lane, heads, count, inner=math.prod(part.shape[axis + 1 :])) for lane in own)
        for part, own in zip(section.parts, region.lanes, strict=True)
    )
    parts = tuple(_of_heads(part, axis, len(heads)) for part in section.parts)
    return msgspec.structs.replace(region, section=PayloadSection(section.name, parts), lanes=lanes)


def _of_heads(part: PayloadPart, axis: int, count: int) -> PayloadPart:
    shape = (*part.shape[:axis], count, *part.shape[axis + 1 :])
    return msgspec.structs.replace(part, shape=shape)


def _cut(lane: Lane, heads: range, count: int, *, inner: int) -> Lane:
    """Return the lane with `heads` of its `count`; behind each head come `inner` items."""
    if len(heads) == count:
        return lane
    behind = 1
    for at in range(len(lane.counts) - 1, -1, -1):
        if behind * lane.counts[at] > inner and behind == inner and lane.counts[at] == count:
            counts = (*lane.counts[:at], len(heads), *lane.counts[at + 1 :])
            address = lane.address + heads.start * lane.strides[at]
            return msgspec.structs.replace(lane, address=address, counts=counts)
        behind *= lane.counts[at]
    raise SpecMismatch(f"heads of a lane with axes {lane.counts} are not one axis")
