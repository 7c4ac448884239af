"""The agreement of all who share a medium about its key: its fingerprint lies there.

    key/fingerprint    32 bytes, then their CRC-32

Whoever comes with another key, or with none, is refused before it reads or writes: by a wrong key
every good record looks forged, and what it wrote would look forged to all others. A fingerprint
that is damaged counts as none and is written anew.
"""

from __future__ import annotations

import zlib
from contextlib import suppress

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.tiers.blobs import Blobs

KEY_PRINT = "key/fingerprint"
_PRINT_BYTES = 32
_SHOWN = 8


def agree(blobs: Blobs, own: bytes, name: str) -> None:
    """Leave the fingerprint `own` (empty: no key) on the medium, or compare it with what is there.

    Raises InvalidInput for another one, and what the medium raises.
    """
    found = _read(blobs)
    if found is None and own:
        with suppress(FileExistsError):
            blobs.put_new(KEY_PRINT, memoryview(own + _crc(own)))
        found = _read(blobs)
        if found is None:  # what lies there is damaged
            blobs.put(KEY_PRINT, memoryview(own + _crc(own)))
            found = own
    if (found or b"") == own:
        if own:
            blobs.settle(KEY_PRINT)
        return
    there = found.hex()[:_SHOWN] if found else "none"
    given = f"the key {own.hex()[:_SHOWN]}" if own else "no key"
    raise InvalidInput(
        "remote-key-file",
        f"{name} is sealed with the key {there}, and {given} is given",
        "give the key file that the medium's other workers have, or name another medium",
    )


def _read(blobs: Blobs) -> bytes | None:
    """Return the fingerprint on the medium; None where there is none, or a damaged one."""
    body = bytearray(_PRINT_BYTES + 4 + 1)
    try:
        body = body[: blobs.get_into(KEY_PRINT, 0, memoryview(body))]
    except FileNotFoundError:
        return None
    found = bytes(body[:_PRINT_BYTES])
    return found if bytes(body[_PRINT_BYTES:]) == _crc(found) else None


def _crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
