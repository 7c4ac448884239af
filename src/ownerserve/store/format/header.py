"""A record's header is encoded and decoded here, byte for byte as docs/format.md has it.

    [ fixed 360 bytes | descriptor | chunk tags | boundaries | zeros to a multiple of 4 KiB ]

Pure: bytes to `RecordHeader` and back. Any bytes at all decode to a RecordHeader or raise Corrupt
or OtherFormat; never anything else. Fields [24, 64) say where the record lies and may be rewritten
when it moves; the MAC leaves them out, so that moving a tenant's record needs no key.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import lru_cache

import msgspec

from ownerserve.kv.errors import Corrupt
from ownerserve.store.format.model import ID_BYTES, SHARED, ArtifactKind, Meta

MAGIC = b"OwnSRec\n"
VERSION = 1
BLOCK = 4096
CHUNK = 1 << 20
MAX_HEADER_BLOCKS = 1024
MAX_PAYLOAD = 1 << 34

_FIXED = struct.Struct("<8sHHBBHII16sIIQQ32s32s32sQQQQHHIQQ16s32s32sIIII16s32s")
_PLACE = struct.Struct("<16sI4xQQ")
_VERSION_AND_BLOCKS, _USED_AND_CRC = struct.Struct("<HH"), struct.Struct("<II")
_NO_CRC = bytes(4)
_CRC_AT, _PLACE_AT, _PLACE_END, _MAC_AT = 20, 24, 64, 328
FIXED_BYTES = _FIXED.size
MAC_BYTES = 32
_KINDS = {int(kind): kind for kind in ArtifactKind}
_NO_TENANT = bytes(ID_BYTES)
assert FIXED_BYTES == 360


class OtherFormat(Corrupt):
    """The record is of a version that this code does not read. It may be good: leave it alone."""


class RecordPlace(msgspec.Struct, frozen=True, gc=False):
    """A record's place is where it lies: the store, the segment's number, the offset; and its age,
    `sequence`.
    """

    store_id: bytes
    segment: int
    offset: int
    sequence: int


class RecordHeader(msgspec.Struct, frozen=True, gc=False):
    """A record header is all that a header says. `tags` is one digest, MAC or cipher tag for each 1
    MiB of payload.
    """

    meta: Meta
    place: RecordPlace
    seal: int
    payload_bytes: int
    created_ms: int
    tags: bytes
    salt: bytes = bytes(16)
    mac: bytes = bytes(MAC_BYTES)
    chunk_bytes: int = CHUNK

    @property
    def header_bytes(self) -> int:
        """Return the bytes of the encoded header, padded to 4 KiB."""
        return header_bytes(self.meta, len(self.tags))

    @property
    def record_bytes(self) -> int:
        """Return what the record occupies: header and payload, each padded to 4 KiB."""
        return self.header_bytes + aligned(self.payload_bytes)

    @property
    def unit_bytes(self) -> int:
        """Return the payload bytes of one unit."""
        return self.payload_bytes // self.meta.units


def aligned(count: int) -> int:
    """Return `count` rounded up to a multiple of 4 KiB."""
    return -(-count // BLOCK) * BLOCK


def chunks_of(payload_bytes: int, chunk_bytes: int = CHUNK) -> int:
    """Count the chunks that carry a tag."""
    return -(-payload_bytes // chunk_bytes)


def header_bytes(meta: Meta, tag_bytes: int) -> int:
    """Return the length in bytes of the header of `meta` with a tag table of `tag_bytes`."""
    return aligned(FIXED_BYTES + len(meta.descriptor) + tag_bytes + len(meta.boundaries))


@lru_cache(maxsize=256)
def _text(value: str, width: int) -> bytes:
    return value.encode().ljust(width, b"\0")


@lru_cache(maxsize=256)  # a store has few components, precisions, kinds of exactness
def _untext(field: bytes) -> str:
    return field.rstrip(b"\0").decode()


def encode(header: RecordHeader) -> bytes:
    """Return the header's bytes, CRC set, padded to 4 KiB."""
    meta, place = header.meta, header.place
    used = FIXED_BYTES + len(meta.descriptor) + len(header.tags) + len(meta.boundaries)
    packed = bytearray(aligned(used))
    _FIXED.pack_into(
        packed,
        0,
        MAGIC,
        VERSION,
        len(packed) // BLOCK,
        meta.kind,
        header.seal,
        0,
        used,
        0,
        place.store_id,
        place.segment,
        meta.units,
        place.offset,
        place.sequence,
        meta.id,
        meta.prefix_hash,
        meta.tenant or _NO_TENANT,
        meta.first_token,
        meta.end_token,
        0,
        0,
        meta.first_layer,
        meta.end_layer,
        header.chunk_bytes,
        header.payload_bytes,
        header.created_ms,
        _text(meta.precision, 16),
        _text(meta.component, 32),
        _text(meta.exactness, 32),
        len(meta.descriptor),
        len(header.tags),
        len(meta.boundaries),
        0,
        header.salt,
        header.mac,
    )
    packed[FIXED_BYTES:used] = meta.descriptor + header.tags + meta.boundaries
    _set_crc(packed, used)
    return bytes(packed)


def moved(encoded: bytes | memoryview, place: RecordPlace) -> bytes:
    """Return the same header at another place; identity, tags and MAC untouched."""
    packed = bytearray(encoded)
    (units,) = struct.unpack_from("<I", packed, 44)
    _PLACE.pack_into(packed, _PLACE_AT, place.store_id, place.segment, place.offset, place.sequence)
    struct.pack_into("<I", packed, 44, units)
    (used,) = struct.unpack_from("<I", packed, 16)
    _set_crc(packed, used)
    return bytes(packed)


def _set_crc(packed: bytearray, used: int) -> None:
    struct.pack_into("<I", packed, _CRC_AT, 0)
    struct.pack_into("<I", packed, _CRC_AT, zlib.crc32(memoryview(packed)[:used]))


def mac_input(encoded: bytes | memoryview) -> bytes:
    """Return what a header's MAC covers: all but the place, the CRC and the MAC itself."""
    view = memoryview(encoded)
    (used,) = struct.unpack_from("<I", view, 16)
    body = bytearray(view[8:20]) + bytes(view[44:48]) + view[_PLACE_END:used]
    at = 12 + 4 + _MAC_AT - _PLACE_END
    body[at : at + MAC_BYTES] = bytes(MAC_BYTES)
    return bytes(body)


def with_mac(encoded: bytes, mac: bytes) -> bytes:
    """Return the header with its MAC filled in."""
    packed = bytearray(encoded)
    packed[_MAC_AT : _MAC_AT + MAC_BYTES] = mac
    (used,) = struct.unpack_from("<I", packed, 16)
    _set_crc(packed, used)
    return bytes(packed)


def peek_bytes(data: bytes | memoryview) -> int:
    """Return the length of a header from its first 4 KiB; raises Corrupt when that is no header,
    OtherFormat for another version.
    """
    if len(data) < BLOCK or data[:8] != MAGIC:
        raise Corrupt("no record header here")
    version, blocks = _VERSION_AND_BLOCKS.unpack_from(data, 8)
    if version not in DECODERS:
        raise OtherFormat(f"record format {version}; this code reads {sorted(DECODERS)}")
    if not 1 <= blocks <= MAX_HEADER_BLOCKS:
        raise Corrupt(f"header of {blocks} blocks")
    return int(blocks) * BLOCK


def decode(data: bytes | memoryview) -> RecordHeader:
    """Return the header at the start of `data`, checked against its CRC and its own arithmetic.
    Raises as `peek_bytes`.
    """
    length = peek_bytes(data)
    if len(data) < length:
        raise Corrupt(f"header cut off at {len(data)} of {length} bytes")
    version, _ = _VERSION_AND_BLOCKS.unpack_from(data, 8)
    header: RecordHeader = DECODERS[version](memoryview(data)[:length])
    return header


def checked_body(data: memoryview) -> int:
    """Check the CRC over the header and return the bytes used; raises Corrupt. Every version starts
    like this.
    """
    used, crc = _USED_AND_CRC.unpack_from(data, 16)
    if not 24 <= used <= len(data):
        raise Corrupt("header length out of range")
    body = bytearray(data[:used])
    body[_CRC_AT : _CRC_AT + 4] = _NO_CRC
    if zlib.crc32(body) != crc:
        raise Corrupt("header CRC does not match")
    return int(used)


def _decode_1(data: memoryview) -> RecordHeader:
    used = checked_body(data)
    if used < FIXED_BYTES:
        raise Corrupt("header too short")
    (
        _magic, _version, _blocks, kind, seal, _zero, _used, _crc, store_id, segment, units,
        offset, sequence, id_, prefix_hash, tenant, first_token, end_token, _was_term, _was_counter,
        first_layer, end_layer, chunk_bytes, payload_bytes, created_ms, precision, component,
        exactness, descriptor_bytes, tags_bytes, boundary_bytes, _zero2, salt, mac,
    ) = _FIXED.unpack_from(data)  # fmt: skip
    tags_at = FIXED_BYTES + descriptor_bytes
    ends_at = tags_at + tags_bytes
    if (
        ends_at + boundary_bytes != used
        or chunk_bytes != CHUNK
        or payload_bytes > MAX_PAYLOAD
        or units < 1
        or payload_bytes % units
    ):
        raise Corrupt("header lengths contradict each other")
    try:
        meta = Meta(
            id=id_,
            kind=_KINDS[kind],
            component=_untext(component),
            prefix_hash=prefix_hash,
            first_token=first_token,
            end_token=end_token,
            tenant=SHARED if tenant == _NO_TENANT else tenant,
            first_layer=first_layer,
            end_layer=end_layer,
            precision=_untext(precision),
            exactness=_untext(exactness),
            descriptor=bytes(data[FIXED_BYTES:tags_at]),
            units=units,
            boundaries=bytes(data[ends_at:used]),
        )
    except (ValueError, KeyError) as error:
        raise Corrupt(f"header field: {error}") from error
    place = RecordPlace(store_id, segment, offset, sequence)
    return RecordHeader(
        meta, place, seal, payload_bytes, created_ms, bytes(data[tags_at:ends_at]), salt, mac
    )


Decoder = Callable[[memoryview], RecordHeader]
DECODERS: dict[int, Decoder] = {VERSION: _decode_1}
"""Version -> its reader. A new version adds one and keeps its predecessor's."""
