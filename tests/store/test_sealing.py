"""What a seal must do beyond catching flipped bits: forged headers, equal payloads, old memory."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.header import BLOCK, decode, moved, with_mac
from ownerserve.store.format.seal import SealKind, Xxh3Seal
from ownerserve.store.format.segment import segment_path
from ownerserve.store.format.verify import draft
from ownerserve.store.index.reader import IndexEntry
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.buffers import BufferPool

TENANT = b"t" * 32
KEYED = [SealKind.BLAKE3, SealKind.AES_GCM]
CREATED, PRECISION, EXACTNESS = 208, 216, 264


def entry_of(tier: DiskTier, samples: Any, number: object) -> IndexEntry:
    entry = tier.core.index.get(samples.meta(number).id)
    assert entry is not None
    return entry


def stored(tier: DiskTier, entry: IndexEntry) -> bytes:
    data = segment_path(tier.core.home.directory, entry.segment).read_bytes()
    return data[entry.offset : entry.offset + entry.stored_bytes]


def with_crc(header: bytes) -> bytes:
    """The header with a CRC that is right, and the MAC that it had: what a forger can do."""
    return with_mac(header, header[328:360])


@pytest.mark.parametrize("at_rest", KEYED)
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (CREATED, struct.pack("<Q", 1)),
        (PRECISION, b"bf16".ljust(16, b"\0")),
        (EXACTNESS, b"approximate/other".ljust(32, b"\0")),
    ],
)
def test_a_header_changed_without_the_key_is_refused(open_disk, samples, at_rest, at, value):
    tier = open_disk(at_rest=at_rest)
    put(tier, samples.meta(1, tenant=TENANT), samples.payload(1))
    entry = entry_of(tier, samples, 1)
    header = bytearray(stored(tier, entry)[: entry.header_bytes])
    assert header[at : at + len(value)] != value
    header[at : at + len(value)] = value
    forged = with_crc(bytes(header))
    decode(forged)  # a sound header but for its MAC
    with segment_path(tier.core.home.directory, entry.segment).open("r+b") as file:
        file.seek(entry.offset)
        file.write(forged)
    assert samples.read(tier, 1) == "corrupt"


@pytest.mark.parametrize("at_rest", KEYED)
def test_a_tenants_record_without_a_mac_is_refused(open_disk, samples, at_rest):
    """All of it right, digest and CRC too: only who has no key would write it so."""
    tier = open_disk(at_rest=at_rest)
    meta = samples.meta(1, tenant=TENANT, descriptor=b"")
    put(tier, meta, samples.payload(1))
    entry = entry_of(tier, samples, 1)
    forged = bytearray(entry.stored_bytes)
    forged[BLOCK : BLOCK + 10_000] = b"forged" * 1666 + b"1234"
    draft(memoryview(forged), meta, 10_000, seal=Xxh3Seal(), now_ms=1)
    place = decode(stored(tier, entry)[:BLOCK]).place
    with segment_path(tier.core.home.directory, entry.segment).open("r+b") as file:
        file.seek(entry.offset)
        file.write(moved(forged[:BLOCK], place) + forged[BLOCK:])
    assert samples.read(tier, 1) == "corrupt"


@pytest.mark.parametrize("at_rest", KEYED)
def test_chunks_can_t_be_exchanged_between_a_tenants_records(open_disk, samples, at_rest):
    """Payload and chunk tags of one record under the header of another."""
    tier = open_disk(at_rest=at_rest)
    for number in (1, 2):
        put(tier, samples.meta(number, tenant=TENANT), samples.payload(number))
    mine, other = (entry_of(tier, samples, number) for number in (1, 2))
    header, donor = bytearray(stored(tier, mine)[:BLOCK]), stored(tier, other)
    tags_at = 360 + len(b'{"block":128}')
    width = len(decode(donor[:BLOCK]).tags)
    header[tags_at : tags_at + width] = donor[tags_at : tags_at + width]
    header[312:328] = donor[312:328]  # its salt
    with segment_path(tier.core.home.directory, mine.segment).open("r+b") as file:
        file.seek(mine.offset)
        file.write(with_crc(bytes(header)) + donor[BLOCK:])
    assert samples.read(tier, 1) == "corrupt"
    assert samples.read(tier, 2) == [samples.payload(2)]


def test_equal_payloads_are_never_equal_ciphertexts(open_disk, samples):
    """A record's cipher key comes from its salt: one drawn twice repeats a key and its nonces."""
    pytest.importorskip("cryptography")
    tier = open_disk(at_rest=SealKind.AES_GCM)
    salts, payloads = set(), set()
    for number in (1, 2, 1):  # removed and stored again, too
        tier.remove([samples.meta(number).id])
        put(tier, samples.meta(number, tenant=TENANT), bytes(8192))
        entry = entry_of(tier, samples, number)
        record = stored(tier, entry)
        salts.add(decode(record[:BLOCK]).salt)
        payloads.add(record[BLOCK : BLOCK + 8192])
    assert len(salts) == len(payloads) == 3
    assert bytes(16) not in salts


@pytest.mark.parametrize("tenant", [b"", TENANT])
def test_a_recycled_buffer_leaks_nothing_into_a_record(clock, samples, tmp_path, tenant):
    pool = BufferPool()
    tier = DiskTier(tmp_path / "store", clock, options=DiskOptions(), landing=pool)
    secret = b"another tenant's state " * 1000
    before = pool.take(2 * BLOCK)
    before[:] = secret[: 2 * BLOCK]
    del before
    reserved = tier.reserve(samples.meta(1, tenant=tenant), 100)
    assert isinstance(reserved, Reservation)
    assert bytes(reserved.payload[:9]) == secret[BLOCK : BLOCK + 9], "the buffer is another one"
    reserved.payload[:] = samples.payload(1, 100)
    tier.commit([reserved])
    record = stored(tier, entry_of(tier, samples, 1))
    tier.close()
    assert record[BLOCK + 100 :] == bytes(BLOCK - 100)
    assert b"tenant's state" not in record
