"""Every decoder of bytes that come from a medium or a peer: what it reads, and how it may fail.

Shared by the short form (test_fuzz.py) and the coverage-guided one (fuzz_decoders.py).
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ownerserve.directory.rpc import frames
from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.kv.wire import rpc as messages
from ownerserve.plan.cost.model import CostModel
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.scan import records
from ownerserve.store.format import convert
from ownerserve.store.format.header import BLOCK, CHUNK, RecordHeader, RecordPlace, decode, encode
from ownerserve.store.format.model import ArtifactKind, Meta
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import Segment, SegmentHeader, decode_segment_header
from ownerserve.store.format.verify import open_header
from ownerserve.store.index import reader
from ownerserve.store.tiers.catalogue import catalogue_key, parse

KEYS = Keys(b"k" * 32)
META = Meta(b"i" * 32, ArtifactKind.RANGE, "csa_main", b"p" * 32, 0, 128, descriptor=b"{}", units=2)
HEADER = encode(RecordHeader(META, RecordPlace(b"s" * 16, 1, 4096, 1), 1, CHUNK + 2, 5, b"d" * 32))
LAYOUT = convert.PayloadLayout(
    engine="vllm",
    engine_version="0.32.0",
    layout_version=3,
    first_layer=0,
    end_layer=3,
    shard=0,
    shards=1,
    block_tokens=64,
    entries=64,
    entry_bytes=8,
    page_bytes=576,
    scalar="bf16",
    scalar_bytes=2,
    byte_order=convert.ByteOrder.LITTLE,
)

Decoder = Callable[[bytes], None]
"""Returns when the bytes were decoded or refused as they should be; raises anything else."""


def header(data: bytes) -> None:
    with suppress(Corrupt):
        found, _ = open_header(memoryview(data), KEYS)
        assert encode(found)[:8] == data[:8]
        assert found.header_bytes <= len(data)


def header_with_a_right_crc(data: bytes) -> None:
    """A CRC is no shield: someone may have made it fit. `data` is xor'ed into a good header."""
    fixed = bytearray(HEADER)
    for at, byte in enumerate(data[: len(fixed) - 8], start=8):
        fixed[at] ^= byte
    used = int.from_bytes(fixed[16:20], "little") % (BLOCK + 1)
    fixed[16:24] = used.to_bytes(4, "little") + bytes(4)
    fixed[20:24] = zlib.crc32(fixed[:used]).to_bytes(4, "little")
    header(bytes(fixed))


def bare_header(data: bytes) -> None:
    with suppress(Corrupt):
        decode(data)


def segment_header(data: bytes) -> None:
    good = SegmentHeader(b"s" * 16, 1, 4096, 0).encode()
    for candidate in (data, good[:8] + data, data[:12] + good[12:]):
        with suppress(Corrupt):
            decode_segment_header(candidate)


def superblock(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, suppress(InvalidInput):
        Path(directory, "STORE").write_bytes(data)
        Home.open(Path(directory))


def segment(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "0000000001.seg")
        path.write_bytes(bytes(BLOCK) + data)
        list(records(Segment(path, 0), BLOCK, b"s" * 16))


def catalogue_entry(data: bytes) -> None:
    with suppress(ValueError, KeyError):
        parse(data.decode(errors="surrogateescape"), 0.0)


def index_row(data: bytes) -> None:
    with suppress(reader.IndexFailed), reader.mapped():
        reader.decode_meta(data)


def layout(data: bytes) -> None:
    found = convert.decode(data)
    if found is not None and found.is_consistent():
        convert.obstacle(found, LAYOUT)


def costs(data: bytes) -> None:
    with suppress(InvalidInput):
        CostModel.restore(data)


def node_rpc(data: bytes) -> None:
    for decoder in (messages.decode_request, messages.decode_answer):
        with suppress(InvalidInput):
            decoder(data)


def directory_rpc(data: bytes) -> None:
    for decoder in (frames.decode_question, frames.decode_answer):
        with suppress(InvalidInput):
            decoder(data)


DECODERS: dict[str, tuple[Decoder, bytes]] = {
    "header": (header, HEADER),
    "header_crc": (header_with_a_right_crc, bytes(24)),
    "bare_header": (bare_header, HEADER),
    "segment_header": (segment_header, SegmentHeader(b"s" * 16, 1, 4096, 0).encode()),
    "segment": (segment, HEADER),
    "superblock": (superblock, b"OwnStor\n\x01\0\0\0"),
    "catalogue_entry": (catalogue_entry, catalogue_key(META, 4096).encode()),
    "index_row": (index_row, msgspec.msgpack.encode(META)),
    "layout": (layout, LAYOUT.encode()),
    "costs": (costs, b'{"version":1}'),
    "node_rpc": (node_rpc, messages.encode(messages.Release(5))),
    "directory_rpc": (directory_rpc, frames.encode(frames.ForgetAll())),
}
"""Name -> (decoder, bytes that it reads)."""
