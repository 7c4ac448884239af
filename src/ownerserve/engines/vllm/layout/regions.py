"""Regions of vLLM's pages, as kv.regions describes memory: what transfer reads by address.

dense, mla, conv, recurrent, pages    a lane for each part of each layer
swa, swa_lead, window_pages           none: a window begins inside of blocks, or has fewer than
                                      the frame; the codec copies these
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ownerserve.kv.frame import LEAD, WINDOW, WINDOW_PAGES, Lane, PayloadSection
from ownerserve.kv.regions import Region

BY_CODEC = frozenset({WINDOW, LEAD, WINDOW_PAGES})


Placed = Sequence[Sequence[tuple[Lane, int]]]
"""A lane for each part and layer, and which of the component's block tables has its blocks."""


def regions_of(placed: Mapping[PayloadSection, Placed], *, blocks: int) -> dict[str, Region]:
    """Return the regions of components of `blocks` blocks, by name: of those whose blocks have the
    rows of the frame, and each layer its parts in one table."""
    found = {}
    for section, parts in placed.items():
        tables = {tuple(table for _, table in part) for part in parts}
        if section.name not in BY_CODEC and len(tables) == 1:
            found[section.name] = _region(section, parts, tables.pop(), blocks)
    return found


def _region(section: PayloadSection, parts: Placed, tables: tuple[int, ...], blocks: int) -> Region:
    lanes = tuple(tuple(lane for lane, _ in part) for part in parts)
    every = [lane for own in lanes for lane in own]
    begin = min(lane.address + lane.reach[0] for lane in every)
    end = max(lane.address + (blocks - 1) * lane.block_bytes + lane.reach[1] for lane in every)
    groups = tables if any(tables) else ()
    region = Region(section, lanes, blocks, begin, end - begin, groups=groups)
    region.check()
    return region
