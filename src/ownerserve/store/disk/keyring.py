"""The keyring says which key a store's tenant records are sealed with, and refuses another.

    DIR/KEY        the store's own key, unless a key file elsewhere is named
    DIR/KEY.next   the one that a rotation makes of it
    DIR/KEYID      fingerprints of the key in use and of the one that a rotation brings in

KEYID decides, the key files only hold bytes: of KEY and KEY.next the one whose fingerprint it has
is the store's. Where KEYID is missing (older releases wrote none) or damaged, the tenant records
tell: their header MACs fit a key or they don't. No key is made, and none taken, beside records
that it does not open: read by a wrong key, every good record looks forged.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from pathlib import Path

import msgspec

from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.scan import records
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.seal import KEY_BYTES, Keys, SealKind, fingerprint
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import open_header
from ownerserve.store.index.reader import IndexFailed, IndexReader

log = logging.getLogger("ownerserve.store")

OWN, NEXT, KEY_ID = "KEY", "KEY.next", "KEYID"
MAGIC = b"OwnSKey\n"
VERSION = 1
_KEY_ID = struct.Struct("<8sHHI16s32s32s")
_CRC = struct.Struct("<I")
_NONE = bytes(32)
_WITNESSES = 4
"""Tenant records at either end of a store whose MACs are tried where there is no KEYID. A rotation
goes from the oldest on and appends, so that one cut short has the old key at one end and the new
one at the other."""


_GIVE_UP = (
    "if it is lost for good, `ownerserve store rotate-key --old-key-lost` gives those records up"
)


class KeyId(msgspec.Struct, frozen=True):
    """A KeyId is what a store knows of its keys: the fingerprint of the one in use, and while a
    rotation is under way that of the next.
    """

    current: bytes
    following: bytes | None = None


class HeldKey(msgspec.Struct, frozen=True):
    """A held key is 32 bytes and the file they came from."""

    path: Path
    key: bytes

    @property
    def mark(self) -> bytes:
        """Return the key's fingerprint."""
        return fingerprint(self.key)


class KeyRing(msgspec.Struct, frozen=True):
    """A key ring is the keys that open a store: new records are sealed with `current`; `former`
    still opens what a rotation that was cut short has left.
    """

    current: HeldKey
    former: HeldKey | None = None

    def keys(self, at_rest: SealKind = SealKind.BLAKE3) -> Keys:
        """Return what makes the seals."""
        former = None if self.former is None else self.former.key
        return Keys(self.current.key, at_rest, former=former)


def read_key_id(home: Home) -> KeyId | None:
    """Return what KEYID says; None where it is missing, damaged or another store's."""
    try:
        data = (home.directory / KEY_ID).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _KEY_ID.size + _CRC.size:
        return None
    magic, version, _, _, store_id, current, following = _KEY_ID.unpack_from(data)
    crc = _CRC.unpack_from(data, _KEY_ID.size)[0]
    if magic != MAGIC or store_id != home.store_id or zlib.crc32(data[: _KEY_ID.size]) != crc:
        return None
    if version != VERSION:
        raise InvalidInput("key", f"{KEY_ID} of format {version}", "use a release that reads it")
    return KeyId(current, following if following != _NONE else None)


def write_key_id(home: Home, key_id: KeyId) -> None:
    """Make `key_id` durable: from here on it decides."""
    body = _KEY_ID.pack(
        MAGIC, VERSION, 0, 0, home.store_id, key_id.current, key_id.following or _NONE
    )
    home.write(KEY_ID, body + _CRC.pack(zlib.crc32(body)))


def held(path: Path) -> HeldKey:
    """Return the key in `path`. Raises InvalidInput when there is none of 32 bytes."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise InvalidInput("key", str(error), "name a readable file of 32 bytes") from error
    if len(key) != KEY_BYTES:
        raise InvalidInput("key", f"{path} has {len(key)} bytes", f"give {KEY_BYTES} random bytes")
    return HeldKey(path, key)


def open_keys(home: Home, key_file: Path | None, at_rest: SealKind = SealKind.BLAKE3) -> Keys:
    """Return a writer's keys: the one in `key_file`, else the store's own, made where none is
    needed yet. Notes the fingerprint. Raises InvalidInput for a key that is not the store's, and
    where it is missing beside tenant records.
    """
    ring = find_ring(home, at_hand(home, key_file))
    if ring is None:
        home.write(OWN, os.urandom(KEY_BYTES))
        ring = KeyRing(held(home.directory / OWN))
        log.info("store %s: a new key, %s", home.directory, ring.current.path)
    if ring.former is None:
        settle(home, ring.current)
    else:
        log.warning(
            "store %s: a key rotation was cut short; `ownerserve store rotate-key` finishes it",
            home.directory,
        )
    return ring.keys(at_rest)


def settle(home: Home, key: HeldKey) -> None:
    """Make `key` the store's only one: KEYID says so first, then KEY.next becomes KEY."""
    if read_key_id(home) != KeyId(key.mark):
        write_key_id(home, KeyId(key.mark))
    if key.path == home.directory / NEXT:
        home.rename(NEXT, OWN)


def reading_keys(home: Home, key_file: Path | None = None) -> Keys:
    """Return a reader's keys; without any where the store's own is not there: what needs it is the
    miss `no_key`. Changes nothing. Raises InvalidInput for a key that is not the store's.
    """
    found = at_hand(home, key_file)
    ring = find_ring(home, found) if found else None
    return Keys() if ring is None else ring.keys()


def at_hand(home: Home, key_file: Path | None) -> list[HeldKey]:
    """List the keys to be tried: that in `key_file`, else the store's own. Raises InvalidInput when
    one can't be read.
    """
    if key_file is not None:
        return [held(key_file)]
    return [held(path) for name in (OWN, NEXT) if (path := home.directory / name).exists()]


def find_ring(home: Home, found: Sequence[HeldKey]) -> KeyRing | None:
    """Return the keys among `found` that open the store; None where there is none and none is
    needed. Raises InvalidInput where one is needed that is not among them.
    """
    said = read_key_id(home)
    by_mark = {key.mark: key for key in found}
    if said is not None:
        if said.following is not None:
            return _both(home, by_mark.get(said.current), by_mark.get(said.following))
        if said.current in by_mark:
            return KeyRing(by_mark[said.current])
    seen = _witnesses(home) if said is None else list(islice(_sealed(home), 1))
    if not seen:
        return KeyRing(found[0]) if found else None  # nothing needs another key
    if not found:
        raise InvalidInput(
            "key",
            f"{home.directory / OWN} is missing, and tenants' records are sealed with it",
            f"put it back or name its copy (--key-file); {_GIVE_UP}",
        )
    for ring in _candidates(found) if said is None else ():
        if all(_opens(ring.keys(), header) for header in seen):
            return ring
    raise InvalidInput(
        "key",
        f"{' and '.join(str(key.path) for key in found)} did not seal the tenants' records of"
        f" {home.directory}",
        f"name the key that did; nothing was changed; {_GIVE_UP}",
    )


def _both(home: Home, current: HeldKey | None, following: HeldKey | None) -> KeyRing:
    if current is None or following is None:
        raise InvalidInput(
            "key",
            f"a rotation of {home.directory} was cut short, and not both of its keys are here",
            "finish it: `ownerserve store rotate-key` with the files it was begun with",
        )
    return KeyRing(following, former=current)


def _candidates(found: Sequence[HeldKey]) -> Iterator[KeyRing]:
    yield from (KeyRing(key) for key in found)
    yield from (KeyRing(new, former=old) for old, new in permutations(found, 2))


def _opens(keys: Keys, header: memoryview) -> bool:
    try:
        open_header(header, keys)
    except Corrupt:
        return False
    return True


def _witnesses(home: Home) -> list[memoryview]:
    """Return tenant records' headers from either end of the store; none where the index has none:
    a store of shared records is not read through for them.
    """
    if _indexed_tenants(home) == 0:
        return []
    seen = list(islice(_sealed(home), _WITNESSES))
    for number in reversed(home.segment_numbers()) if seen else ():
        if last := deque(_sealed_in(home, number), maxlen=_WITNESSES):
            return [*seen, *last]
    return seen


def _indexed_tenants(home: Home) -> int | None:
    """Count the tenants that have records by the index; None where it can't be asked."""
    if not home.index_path.exists():
        return None
    index = IndexReader(home.index_path)
    try:
        return len({tenant for tenant, _ in index.usage() if tenant})
    except IndexFailed:
        return None
    finally:
        index.close()


def _sealed(home: Home) -> Iterator[memoryview]:
    for number in home.segment_numbers():
        yield from _sealed_in(home, number)


def _sealed_in(home: Home, number: int) -> Iterator[memoryview]:
    """Yield the headers of a segment's records that a key was needed for."""
    segment = Segment(segment_path(home.directory, number), os.O_RDONLY)
    for record in records(segment, BLOCK, home.store_id):
        if record.meta.tenant and record.seal != SealKind.XXH3:
            header = memoryview(mmap.mmap(-1, record.header_bytes))
            segment.read(record.place.offset, header)
            yield header
