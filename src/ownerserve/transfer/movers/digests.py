"""Digests of a piece's bytes, in their order, over memory that is given by `Runs`.

    Xxh3            xxh3_128, 16 bytes: finds accidents
    KeyedBlake3     blake3 under a key that both sides have, 32 bytes: finds forgery too

Nothing is copied: a hasher is shown the memory itself. The memory must stay mapped meanwhile.
"""

from __future__ import annotations

import ctypes
import hmac
from typing import Protocol

import msgspec
from blake3 import blake3
from xxhash import xxh3_128

from ownerserve.transfer.vocabulary import Runs

_CONTEXT = "ownerserve transfer digests key 1"
_WRITABLE = 0x200
"""PyBUF_WRITE, of Python's C API."""
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


class Hasher(Protocol):
    """A `Hasher` is a digest under way."""

    def update(self, data: memoryview, /) -> object:
        """Take the bytes that follow; lets other threads run while it is at work on many."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all bytes taken so far."""
        ...


class Digests(Protocol):
    """`Digests` are one way to make a digest; both sides of a read use the same."""

    def begin(self) -> Hasher:
        """Return a hasher that has seen nothing."""
        ...


class Xxh3(msgspec.Struct, frozen=True):
    """`Xxh3` makes xxh3_128: 16 bytes, which find accidents and no forgery."""

    def begin(self) -> Hasher:
        """Return a hasher that has seen nothing."""
        return xxh3_128()


class KeyedBlake3(msgspec.Struct, frozen=True):
    """`KeyedBlake3` makes blake3 under `key` (32 bytes): 32 bytes, which only who has the key can
    make. For peers and tenants that are not trusted with each other's memory."""

    key: bytes

    def begin(self) -> Hasher:
        """Return a hasher that has seen nothing."""
        return blake3(key=self.key)


def fleet_digests(secret: bytes) -> KeyedBlake3:
    """Return the digests that whoever has a fleet's transfer secret makes alike."""
    return KeyedBlake3(blake3(secret, derive_key_context=_CONTEXT).digest())


class RunsMemory:
    """A `RunsMemory` shows the bytes of this process's `Runs` without copying them.

    One view spans all runs, and what lies between them as well, which must not be touched.
    """

    def __init__(self, runs: Runs) -> None:
        some = len(runs.addresses) > 0
        self._base = int(runs.addresses.min()) if some else 0
        span_bytes = int((runs.addresses + runs.lengths).max()) - self._base if some else 0
        self._view: memoryview = _view(self._base, span_bytes, _WRITABLE)

    def at(self, address: int, length: int) -> memoryview:
        """Return the bytes [address, address + length), which lie in a run."""
        begin = address - self._base
        return self._view[begin : begin + length]


def digest_of(runs: Runs, digests: Digests) -> bytes:
    """Return the digest of what lies in this process's runs, in their order."""
    memory, hasher = RunsMemory(runs), digests.begin()
    pairs = zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True)
    for address, length in pairs:
        hasher.update(memory.at(address, length))
    return hasher.digest()


def matches(said: bytes, found: bytes) -> bool:
    """Tell whether two digests are the same, in a time that does not say where they differ."""
    return hmac.compare_digest(said, found)
