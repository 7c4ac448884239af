"""This module verifies that a record is the one asked for, and that these are its bytes: the one
place that answers.

Every tier reads through here. Invariant 4: nothing is READY without a digest and an id that match.
"""

from __future__ import annotations

from hmac import compare_digest

from ownerserve.kv.errors import Corrupt
from ownerserve.store.format.header import (
    CHUNK,
    RecordHeader,
    RecordPlace,
    aligned,
    chunks_of,
    decode,
    encode,
    header_bytes,
    mac_input,
    with_mac,
)
from ownerserve.store.format.model import Meta, Want
from ownerserve.store.format.seal import NO_MAC, Keys, Seal, SealKind, new_salt

_SEALS = frozenset(int(kind) for kind in SealKind)


class NoKey(Corrupt):
    """The record may be good; the key that would tell is not at hand."""


class Forged(Corrupt):
    """The header is whole and its MAC is not by our key: somebody else's record."""


class BadRange(Corrupt):
    """The want asks for units that the record does not have."""


def record_room(meta: Meta, payload_bytes: int, seal: Seal) -> tuple[int, int]:
    """Return (header bytes, record bytes) of a record still to be written."""
    head = header_bytes(meta, chunks_of(payload_bytes) * seal.tag_bytes)
    return head, head + aligned(payload_bytes)


def draft(
    record: memoryview, meta: Meta, payload_bytes: int, *, seal: Seal, now_ms: int
) -> RecordHeader:
    """Seal the payload that lies in `record` and put a placeless header before it.

    The padding is zeroed: a recycled buffer must not leak what it held before.
    """
    head, total = record_room(meta, payload_bytes, seal)
    payload = record[head : head + payload_bytes]
    record[head + payload_bytes : total] = bytes(total - head - payload_bytes)
    salt = new_salt(seal)
    tags = seal.close(payload, salt)
    header = RecordHeader(
        meta, RecordPlace(bytes(16), 0, 0, 0), seal.kind, payload_bytes, now_ms, tags, salt
    )
    encoded = encode(header)
    mac = seal.header_mac(mac_input(encoded))
    record[:head] = encoded if mac == NO_MAC else with_mac(encoded, mac)
    return header


def open_header(data: memoryview, keys: Keys) -> tuple[RecordHeader, Seal]:
    """Decode the header and check its MAC; returns it and the seal that its chunks bear. Raises
    Corrupt, or NoKey.
    """
    header = decode(data)
    if header.seal not in _SEALS:
        raise Corrupt(f"unknown seal {header.seal}")
    seals = keys.for_read(header.meta.tenant, header.seal)
    if not seals:
        if not keys.may_bear(header.meta.tenant, header.seal):
            raise Forged("not sealed as such a record must be")
        raise NoKey("no key for this tenant")
    if len(header.tags) != chunks_of(header.payload_bytes) * seals[0].tag_bytes:
        raise Corrupt("chunk table of the wrong length")
    if header.seal == SealKind.XXH3:
        if header.mac != NO_MAC:
            raise Corrupt("header MAC does not match")
        return header, seals[0]
    covered = mac_input(data[: header.header_bytes])
    for seal in seals:
        if compare_digest(seal.header_mac(covered), header.mac):
            return header, seal
    raise Forged("header MAC does not match")


def check_place(header: RecordHeader, store_id: bytes, segment: int, offset: int) -> None:
    """Raise Corrupt when the record says it lies elsewhere: a misplaced or embedded one is not
    taken for another.
    """
    place = header.place
    if (place.segment, place.offset) != (segment, offset) or place.store_id != store_id:
        raise Corrupt("the record says it lies elsewhere")


def check_meta(header: RecordHeader, expected: Meta, payload_bytes: int) -> None:
    """Raise Corrupt unless the header says what the catalogue said."""
    meta = header.meta
    if meta.id != expected.id:
        raise Corrupt("another artifact's record")
    if header.payload_bytes != payload_bytes:
        raise Corrupt("another length than the catalogue has")
    if meta.tenant != expected.tenant or meta.kind != expected.kind:
        raise Corrupt("another tenant or kind than the catalogue has")
    if meta.component != expected.component or meta.prefix_hash != expected.prefix_hash:
        raise Corrupt("another component or prefix than the catalogue has")


def open_chunks(
    payload: memoryview, header: RecordHeader, seal: Seal, first_chunk: int = 0
) -> None:
    """Check (and decrypt in place) whole chunks, `payload` starting at `first_chunk`."""
    width = seal.tag_bytes
    for at in range(0, len(payload), CHUNK):
        index = first_chunk + at // CHUNK
        tag = header.tags[index * width : (index + 1) * width]
        if not seal.open(payload[at : at + CHUNK], tag, (header.salt, index)):
            raise Corrupt(f"chunk {index} does not match its digest")


def span_of(want: Want, units: int, payload_bytes: int) -> tuple[int, int]:
    """Return the payload bytes [low, high) of a want; raises BadRange when the record has no such
    units.
    """
    end = units if want.end_unit is None else want.end_unit
    if not 0 <= want.first_unit < end <= units:
        raise BadRange(f"units [{want.first_unit}, {end}) of {units}")
    unit_bytes = payload_bytes // units
    return want.first_unit * unit_bytes, end * unit_bytes


def chunk_span(low: int, high: int, payload_bytes: int) -> tuple[int, int]:
    """Return [low, high) widened to whole chunks."""
    return low - low % CHUNK, min(-(-high // CHUNK) * CHUNK, payload_bytes)
