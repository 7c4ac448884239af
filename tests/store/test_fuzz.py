"""Decoders under arbitrary bytes: a value, or Corrupt. Never another exception, never a lie.

Short form, by Hypothesis. The long form, coverage-guided, is fuzz_decoders.py (atheris).
"""

from __future__ import annotations

import os
import struct
import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ownerserve.directory.rpc import frames
from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.kv.wire import rpc as messages
from ownerserve.plan.cost.model import CostModel
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.scan import records
from ownerserve.store.format.header import BLOCK, decode
from ownerserve.store.format.segment import Segment
from tests.support.store.decoders import DECODERS, HEADER, header

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@quick
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=2 * BLOCK))
def test_anything(name, data):
    DECODERS[name][0](data)


@quick
@given(st.sampled_from(sorted(DECODERS)), st.integers(0, 500), st.integers(1, 255))
def test_good_bytes_with_one_changed(name, at, flip):
    decoder, good = DECODERS[name]
    data = bytearray(good)
    data[at % len(data)] ^= flip
    decoder(bytes(data))


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_good_bytes_and_bytes_cut_off(name):
    decoder, good = DECODERS[name]
    for end in range(0, len(good) + 1, max(1, len(good) // 50)):
        decoder(good[:end])


DEEP = b"\x91" * 100_000 + b"\x01"


@pytest.mark.parametrize("decoder", [messages.decode_request, messages.decode_answer])
def test_a_deep_nest_in_a_field_that_nobody_knows_is_no_message_of_the_node(decoder):
    known = msgspec.msgpack.encode({"type": "release", "zz": None, "reservation": 5})
    with pytest.raises(InvalidInput, match=r"depth|Invalid"):
        decoder(b"\x92\x01" + known.replace(b"\xc0", DEEP))


def test_a_deep_nest_in_a_field_that_nobody_knows_is_no_message_of_the_directory():
    known = msgspec.msgpack.encode({"type": "forget", "zz": None})
    with pytest.raises(InvalidInput, match="depth"):
        frames.decode_question(bytes([0x92, frames.VERSION]) + known.replace(b"\xc0", DEEP))


def test_a_deep_nest_is_no_cost_model():
    with pytest.raises(InvalidInput, match="depth"):
        CostModel.restore(b'{"zz":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@quick
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=6))
def test_header_with_wrong_fields_and_a_right_crc(changes):
    """A CRC is no shield: someone may have made it fit."""
    data = bytearray(HEADER)
    for at, value in changes:
        data[at] = value
    (used,) = struct.unpack_from("<I", data, 16)
    struct.pack_into("<I", data, 20, 0)
    struct.pack_into("<I", data, 20, zlib.crc32(data[: min(used, len(data))]))
    header(bytes(data))


@quick
@given(st.integers(0, BLOCK - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed_where_it_matters(at, flip):
    data = bytearray(HEADER)
    data[at] ^= flip
    try:
        changed = decode(bytes(data))
    except Corrupt:
        return
    assert changed == decode(HEADER)  # only padding may change unnoticed
    assert at >= 360 + 2 + 32


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
@given(st.lists(st.one_of(st.binary(max_size=64), st.just(HEADER), st.just(bytes(BLOCK)))))
def test_scan_of_any_segment(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("segment") / "0000000001.seg"
    body = b"".join(piece.ljust(BLOCK, b"\0") for piece in pieces)
    path.write_bytes(bytes(BLOCK) + body)
    found = list(records(Segment(path, os.O_RDONLY), BLOCK, b"s" * 16))
    assert len(found) == (pieces[:1] == [HEADER])  # a header elsewhere says that it lies at 4096
