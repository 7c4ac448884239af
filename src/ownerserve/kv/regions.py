"""A region is the memory in which an engine keeps one component's blocks, as others may read it.

    component   one of kv.frame's sections, e.g. `dense`
    lanes       lanes[part][layer]: where each part of each layer lies, in the frame's order
    block b     of a lane begins at lane.address + b * lane.block_bytes

Addresses are the owning process's. What is in a block changes unless a ticket (cache.lends) or a
reservation (cache.ingest) keeps it.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.frame import Lane, PayloadSection


class SharedMemory(msgspec.Struct, frozen=True):
    """A `SharedMemory` is a POSIX shared memory object: its `name`, and the `address` and `bytes`
    at which the owning process has all of it."""

    name: str
    address: int
    bytes: int


class Region(msgspec.Struct, frozen=True):
    """A `Region` is one component's blocks: `section` says what a block holds, `lanes` where,
    `blocks` how many there are. All lanes lie within [`address`, `address` + `bytes`).

    `groups[layer]` is the block table (of several that one prefix may have) by which the layer's
    blocks are named; all 0 where there is one. `shared`: the memory object that holds the region,
    where another process of this host may map it.
    """

    section: PayloadSection
    lanes: tuple[tuple[Lane, ...], ...]
    blocks: int
    address: int
    bytes: int
    groups: tuple[int, ...] = ()
    shared: SharedMemory | None = None
