"""Coverage-guided fuzzing of every decoder of the store's format, by atheris.

python tests/store/fuzz_decoders.py -max_total_time=600 -max_len=8192
"""

from __future__ import annotations

import sys
import zlib

import atheris

with atheris.instrument_imports():
    from ownerserve.kv.errors import Corrupt
    from ownerserve.store.header import CHUNK, Header, Place, decode, encode
    from ownerserve.store.model import Kind, Meta
    from ownerserve.store.seal import Keys
    from ownerserve.store.segment import decode_segment_header
    from ownerserve.store.verify import open_header

KEYS = Keys(b"k" * 32)


META = Meta(b"i" * 32, Kind.RANGE, "csa_main", b"p" * 32, 0, 128, descriptor=b"{}", units=2)
GOOD = encode(Header(META, Place(b"s" * 16, 1, 4096, 1), 1, CHUNK + 2, 5, b"d" * 32))


def changed(data: bytes) -> bytes:
    """A good header with bytes xor'ed from the second field on, and a CRC that fits."""
    fixed = bytearray(GOOD)
    for at, byte in enumerate(data[: len(fixed) - 8], start=8):
        fixed[at] ^= byte
    used = int.from_bytes(fixed[16:20], "little") % 4097
    fixed[16:24] = used.to_bytes(4, "little") + bytes(4)
    fixed[20:24] = zlib.crc32(fixed[:used]).to_bytes(4, "little")
    return bytes(fixed)


def one(data: bytes) -> None:
    for candidate in (data, changed(data)):
        for decoder in (decode, decode_segment_header):
            try:
                decoder(candidate)
            except Corrupt:
                continue
        try:
            open_header(memoryview(candidate), KEYS)
        except Corrupt:
            continue


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
