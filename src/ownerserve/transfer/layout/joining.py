"""Joining brings two sides' runs of one byte order together: what is copied from where to where.

    source   |   100 bytes   | 50  |      peer's addresses
    goal     |  60  |     90       |      own addresses
    copies   |  60  | 40 | 50      |

For movers that read by single copies. Those that take two lists of their own (process_vm_readv)
need no joining.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import SpecMismatch
from ownerserve.transfer.vocabulary import Runs


class CopyList(msgspec.Struct, frozen=True, eq=False):
    """A `CopyList` is what is to be copied: int64 [n] each, `lengths` bytes from the `source`
    address to the `goal` address. Neighbours that touch on both sides are one."""

    source: NDArray[np.int64]
    goal: NDArray[np.int64]
    lengths: NDArray[np.int64]


def join(goal: Runs, source: Runs) -> CopyList:
    """Return the copies that bring `source`'s bytes to `goal`, in their order. Raises SpecMismatch
    where the two are not as long."""
    if goal.bytes != source.bytes:
        raise SpecMismatch(f"{source.bytes} bytes for a goal of {goal.bytes}")
    if np.array_equal(goal.lengths, source.lengths):
        return CopyList(source.addresses, goal.addresses, goal.lengths)
    ends, own_ends = np.cumsum(source.lengths), np.cumsum(goal.lengths)
    both = np.concatenate((ends, own_ends))
    both.sort(kind="stable")  # two sorted runs: merged, not sorted
    cuts = both[np.append(True, both[1:] != both[:-1])]
    begins = np.append(0, cuts[:-1])
    at, own_at = np.searchsorted(ends, begins, "right"), np.searchsorted(own_ends, begins, "right")
    return CopyList(
        source.addresses[at] + begins - (ends[at] - source.lengths[at]),
        goal.addresses[own_at] + begins - (own_ends[own_at] - goal.lengths[own_at]),
        cuts - begins,
    )
