"""A segment is one file: preallocated, appended to, never overwritten; what is dead in it is
erased.

    [ segment header 4 KiB | record | record | ... | zeros up to the preallocated size ]

Owns a file descriptor and nothing else. It does not know which records are alive.
Erasing punches a hole (or zeroes the header where the file system has no holes), so that an
evicted record gives back its space at once, and a purged one is gone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ownerserve.kv.durable import sync_directory
from ownerserve.kv.errors import Corrupt
from ownerserve.store.format.header import BLOCK, OtherFormat

MAGIC = b"OwnSSeg\n"
VERSION = 1
READABLE = frozenset({VERSION})
SUFFIX = ".seg"
_HEADER = struct.Struct("<8sHHI16sIQQ")
_CRC = struct.Struct("<I")
_IOV_MAX = 512
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DirectRead(msgspec.Struct, gc=False):
    """A direct read is one that is to be made: bytes of one open file and the memory they land
    in.
    """

    fd: int
    offset: int
    into: memoryview


class SegmentHeader(msgspec.Struct, frozen=True):
    """A segment header is the first 4 KiB of a segment file."""

    store_id: bytes
    number: int
    size_bytes: int
    created_ms: int

    def encode(self) -> bytes:
        """Return the header's 4 KiB."""
        body = _HEADER.pack(
            MAGIC, VERSION, 0, 0, self.store_id, self.number, self.size_bytes, self.created_ms
        )
        return (body + _CRC.pack(zlib.crc32(body))).ljust(BLOCK, b"\0")


def decode_segment_header(data: bytes | memoryview) -> SegmentHeader:
    """Return the segment header at the start of `data`. Raises Corrupt or OtherFormat."""
    if len(data) < _HEADER.size + _CRC.size:
        raise Corrupt("segment header cut off")
    magic, version, _, _, store_id, number, size_bytes, created_ms = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt("no segment header")
    if version not in READABLE:
        raise OtherFormat(f"segment format {version}; this code reads {sorted(READABLE)}")
    if zlib.crc32(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]:
        raise Corrupt("segment header CRC does not match")
    return SegmentHeader(store_id, number, size_bytes, created_ms)


def segment_path(directory: Path, number: int) -> Path:
    """Return where segment `number` of the store at `directory` lies."""
    return directory / "segments" / f"{number:010d}{SUFFIX}"


def page(data: bytes) -> mmap.mmap:
    """Return `data` in aligned memory, as direct I/O wants it."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


class Segment:
    """A segment is an open segment file. The descriptor closes when the last holder lets go of the
    object.
    """

    __slots__ = ("_fd", "direct", "number", "path", "writable")

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = -1
        self.path = path
        self.number = int(path.stem)
        self.writable = bool(flags & os.O_RDWR)
        try:
            self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: no direct I/O on this file system
                raise
            self._fd = os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o600)
            self.direct = False

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @classmethod
    def create(cls, directory: Path, header: SegmentHeader) -> Segment:
        """Make a new segment with all its space and a durable name; its header is durable with the
        first record. Raises OSError and leaves nothing behind.
        """
        path = segment_path(directory, header.number)
        segment = cls(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(segment._fd, 0, header.size_bytes)
            segment.write(0, [memoryview(page(header.encode()))])
            sync_directory(path.parent)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise
        return segment

    def read_header(self) -> SegmentHeader:
        """Return the segment's own header; raises Corrupt when it names another number."""
        memory = mmap.mmap(-1, BLOCK)
        self.read(0, memoryview(memory))
        header = decode_segment_header(memory[:])
        if header.number != self.number:
            raise Corrupt(f"{self.path.name} says it is segment {header.number}")
        return header

    def read(self, offset: int, into: memoryview) -> int:
        """Read into `into`; returns the bytes read, fewer than asked at the end of the file. Raises
        OSError.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            done += count
            if count == 0 or count % BLOCK:
                break
        return done

    def load(self, offset: int, into: memoryview) -> DirectRead:
        """Return a read of this segment for a ReadQueue; hold the segment until it is done."""
        return DirectRead(self._fd, offset, into)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all of `views`, one after another from `offset`; raises OSError."""
        left = list(views)
        while left:
            count = os.pwritev(self._fd, left[:_IOV_MAX], offset)
            if count <= 0 or (self.direct and count % BLOCK):
                raise OSError(errno.EIO, "short write", str(self.path))
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def sync(self) -> None:
        """Make what was written durable. After an OSError nothing written since is trusted."""
        os.fdatasync(self._fd)

    def erase(self, spans: Sequence[tuple[int, int]]) -> None:
        """Make the records at (offset, length) unreadable and give back their space."""
        for offset, length in spans:
            if _libc.fallocate(self._fd, _KEEP_SIZE_AND_PUNCH, offset, length):
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(code, os.strerror(code), str(self.path))
                self.write(offset, [memoryview(page(bytes(BLOCK)))])

    def resize(self, end: int, size_bytes: int) -> None:
        """Cut off what lies beyond `end`, then preallocate up to `size_bytes` again."""
        os.ftruncate(self._fd, end)
        if size_bytes > end:
            os.posix_fallocate(self._fd, 0, size_bytes)

    def size(self) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(self._fd).st_size

    def next_data(self, offset: int) -> int | None:
        """Return the first offset at or after `offset` that is no hole (`offset` itself where the
        file system can't tell); None at the end of data.
        """
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return offset
            raise
