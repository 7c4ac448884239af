"""Decoders under arbitrary bytes: a value, or Corrupt. Never another exception, never a lie.

Short form, by Hypothesis. The long form, coverage-guided, is fuzz_decoders.py (atheris).
"""

from __future__ import annotations

import os
import struct
import zlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.store.header import BLOCK, CHUNK, Header, Place, decode, encode
from ownerserve.store.home import Home
from ownerserve.store.model import Kind, Meta
from ownerserve.store.scan import records
from ownerserve.store.seal import Keys
from ownerserve.store.segment import Segment, SegmentHeader, decode_segment_header
from ownerserve.store.verify import open_header

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
KEYS = Keys(b"k" * 32)
META = Meta(b"i" * 32, Kind.RANGE, "csa_main", b"p" * 32, 0, 128, descriptor=b"{}", units=2)
GOOD = encode(Header(META, Place(b"s" * 16, 1, 4096, 1), 1, CHUNK + 2, 5, b"d" * 32))


def try_header(data: bytes) -> None:
    try:
        header, _ = open_header(memoryview(data), KEYS)
    except Corrupt:
        return
    assert encode(header)[:8] == data[:8]
    assert header.header_bytes <= len(data)


@quick
@given(st.binary(max_size=2 * BLOCK))
def test_header_of_anything(data):
    try_header(data)


@quick
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=6))
def test_header_with_wrong_fields_and_a_right_crc(changes):
    """A CRC is no shield: someone may have made it fit."""
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    (used,) = struct.unpack_from("<I", data, 16)
    struct.pack_into("<I", data, 20, 0)
    struct.pack_into("<I", data, 20, zlib.crc32(data[: min(used, len(data))]))
    try_header(bytes(data))


@quick
@given(st.integers(0, BLOCK - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed_where_it_matters(at, flip):
    data = bytearray(GOOD)
    data[at] ^= flip
    try:
        changed = decode(bytes(data))
    except Corrupt:
        return
    assert changed == decode(GOOD)  # only padding may change unnoticed
    assert at >= 360 + 2 + 32


@quick
@given(st.binary(max_size=200))
def test_segment_header_of_anything(data):
    good = SegmentHeader(b"s" * 16, 1, 4096, 0).encode()
    for candidate in (data, good[:8] + data, data[:12] + good[12:]):
        try:
            decode_segment_header(candidate)
        except Corrupt:
            continue


@quick
@given(st.binary(max_size=100), st.integers(0, 40))
def test_superblock_of_anything(tmp_path_factory, data, keep):
    directory = tmp_path_factory.mktemp("home")
    home = Home.create_or_open(directory)
    home.unlock()
    path = directory / "STORE"
    path.write_bytes(path.read_bytes()[:keep] + data)
    try:
        Home.open(directory)
    except InvalidInput:
        return


@quick
@given(st.lists(st.one_of(st.binary(max_size=64), st.just(GOOD), st.just(bytes(BLOCK)))))
def test_scan_of_any_segment(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("segment") / "0000000001.seg"
    body = b"".join(piece.ljust(BLOCK, b"\0") for piece in pieces)
    path.write_bytes(bytes(BLOCK) + body)
    found = list(records(Segment(path, os.O_RDONLY), BLOCK, b"s" * 16))
    assert len(found) == (pieces[:1] == [GOOD])  # a header elsewhere says that it lies at 4096
