"""Layouts that engines are known to have, one file each: a `Pool` in, its region out.

A new layout is a file with one function, and its line here. tests/transfer/layout takes it from
here, alone and together with each other one, and compares it with a copy item by item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.known import (
    combined,
    headwise,
    interleaved,
    paged_rows,
    ring,
    slots,
    split,
    states,
    tiled,
)

LAYOUTS: Mapping[str, Callable[[Pool], Region]] = {
    "combined": combined.region,
    "headwise": headwise.region,
    "interleaved": interleaved.region,
    "paged_rows": paged_rows.region,
    "ring": ring.region,
    "slots": slots.region,
    "split": split.region,
    "states": states.region,
    "tiled": tiled.region,
}
