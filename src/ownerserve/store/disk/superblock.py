"""The superblock, DIR/STORE, says which store this is and how large its segments are.

It has no second copy of its own: every segment's header says the same, so that it is made again
from them where it is damaged or gone.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from pathlib import Path

import msgspec

from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.format.header import BLOCK, OtherFormat
from ownerserve.store.format.segment import SUFFIX, Segment, SegmentHeader

NAME = "STORE"
MAGIC = b"OwnStor\n"
VERSION = 1
READABLE = frozenset({VERSION})
DEFAULT_SEGMENT_BYTES = 256 * MIB
MIN_SEGMENT_BYTES = 16 * BLOCK
STORE_ID_BYTES = 16
_BODY = struct.Struct("<8sHHI16sQ")
_CRC = struct.Struct("<I")


class Superblock(msgspec.Struct, frozen=True):
    """A superblock is what is fixed about a store when it is made."""

    store_id: bytes
    segment_bytes: int

    def encode(self) -> bytes:
        """Return the 4 KiB of DIR/STORE."""
        body = _BODY.pack(MAGIC, VERSION, 0, 0, self.store_id, self.segment_bytes)
        return (body + _CRC.pack(zlib.crc32(body))).ljust(BLOCK, b"\0")


def decode_superblock(data: bytes) -> Superblock:
    """Return the superblock at the start of `data`. Raises Corrupt or OtherFormat."""
    if len(data) < _BODY.size + _CRC.size:
        raise Corrupt("cut off")
    magic, version, _, _, store_id, segment_bytes = _BODY.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt("no superblock")
    if zlib.crc32(data[: _BODY.size]) != _CRC.unpack_from(data, _BODY.size)[0]:
        raise Corrupt("CRC does not match")
    if version not in READABLE:
        raise OtherFormat(f"format {version}; this code reads {sorted(READABLE)}")
    return Superblock(store_id, segment_bytes)


def read_superblock(directory: Path) -> Superblock | None:
    """Return what the STORE file of `directory` says; None when it is damaged or not there. Raises
    InvalidInput for another format, and OSError.
    """
    try:
        return decode_superblock((directory / NAME).read_bytes())
    except OtherFormat as error:
        raise InvalidInput(
            "store", f"{directory}: {error}", "use a release that reads it"
        ) from error
    except (FileNotFoundError, NotADirectoryError, Corrupt):
        return None


def from_segments(directory: Path) -> Superblock | None:
    """Return the superblock that the segments of the store at `directory` tell; None when they tell
    none, or two stores equally often. Raises OSError.

    The size is that of the smallest: a segment of one large record has the record's.
    """
    headers = [header for path in _segments(directory) if (header := _header(path)) is not None]
    votes = Counter(header.store_id for header in headers).most_common(2)
    if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
        return None
    store_id, _ = votes[0]
    return Superblock(store_id, min(h.size_bytes for h in headers if h.store_id == store_id))


def _segments(directory: Path) -> list[Path]:
    found = (directory / "segments").glob(f"*{SUFFIX}")
    return sorted(path for path in found if path.stem.isdecimal())


def _header(path: Path) -> SegmentHeader | None:
    try:
        header = Segment(path, os.O_RDONLY).read_header()
    except Corrupt:
        return None
    is_size = header.size_bytes % BLOCK == 0 and header.size_bytes >= MIN_SEGMENT_BYTES
    return header if is_size else None
