"""Words of transfer: what is asked for, where it lies, how a read ended.

    artifact   a sealed record: units [0, n) of one component, by id      kv.frame
    piece      units [first, end) of an artifact, of some of its layers: one digest, one read
    runs       addresses and lengths in one process's memory, in the order of a piece's bytes

The order of a piece's bytes: unit by unit; in a unit part by part, without the padding between
parts; in a part layer by layer; each as kv.frame has it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray


class FramePiece(msgspec.Struct, frozen=True, gc=False):
    """A `FramePiece` is units [first_unit, end_unit) of the artifact with that id (32 bytes), of
    its layers [first_layer, end_layer) and of its heads [first_head, end_head); both 0: all heads.
    """

    artifact: bytes
    first_unit: int
    end_unit: int
    first_layer: int
    end_layer: int
    first_head: int = 0
    end_head: int = 0


class Runs(msgspec.Struct, frozen=True, eq=False):
    """`Runs` are where bytes lie in one process's memory: int64 `addresses` and `lengths` [n], in
    the order of the bytes. Neighbours that touch are one run."""

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Return the bytes of all runs."""
        return int(self.lengths.sum())


class Road(msgspec.Struct, frozen=True, gc=False):
    """A `Road` is a kind of mover, as control must know it: `is_fenced` as `Mover` says it, and
    whether its reads are signed: the source sees each, and asks for the ticket before it says that
    the read was good. After reads that are not, the reader asks `More` before it commits."""

    name: str
    is_fenced: bool
    is_signed: bool


class ReadFailure(StrEnum):
    """A `ReadFailure` says why a read brought nothing that counts. Labels of metrics."""

    GONE = "gone"  # the ticket is over: what was read may be another's
    REFUSED = "refused"  # not lent, or no such piece
    CORRUPT = "corrupt"  # the bytes do not match their digest, or a frame is forged
    PEER_LOST = "peer_lost"  # killed, or the link broke
    LATE = "late"  # the deadline passed
    CANCELLED = "cancelled"
    UNABLE = "unable"  # this road is not open here: no rights, no such device


class Read(msgspec.Struct, frozen=True, eq=False):
    """A `Read` asks a mover to bring one piece. `number` is the asker's, used once.

    `goal` are this process's runs, `source` the peer's: a mover that reads by address needs them,
    one that asks by name gets None. `digest` is what the source said of the bytes, in their order.
    The read is over by `deadline_s` (monotonic), whatever the peer does.
    """

    number: int
    ticket: int
    piece: FramePiece
    goal: Runs
    source: Runs | None
    digest: bytes
    deadline_s: float


class ReadLanded(msgspec.Struct, frozen=True, gc=False):
    """All bytes of the read are in its goal, match its digest, and no writer is left."""

    number: int
    bytes: int


class ReadFailed(msgspec.Struct, frozen=True, gc=False):
    """The read brought nothing that counts; part of its goal may be written, and no writer is
    left."""

    number: int
    reason: ReadFailure


class ReadUnproven(msgspec.Struct, frozen=True, gc=False):
    """The read brought nothing that counts, and its writer may still write: its goal, which is in
    an arena, may not be used again until `ReadQuiet`."""

    number: int
    reason: ReadFailure


class ReadQuiet(msgspec.Struct, frozen=True, gc=False):
    """The writer of a read that ended `ReadUnproven` has stopped for good."""

    number: int


Ended = ReadLanded | ReadFailed | ReadUnproven | ReadQuiet
