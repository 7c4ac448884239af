"""The prefix chain: one digest for each full block, each over everything before it.

    digest[i] = SHA-256(digest[i-1] || tokens of block i as little-endian uint32)
    digest[-1] = SHA-256(DOMAIN || block size)

Equal digests mean equal prefixes at equal block size. Only full blocks have one; the tail of a
prompt that does not fill a block is not addressable. A chain is grown, never rewound: a turn
hashes only what it adds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from sys import byteorder

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash

DOMAIN = b"ownerserve/prefix/1"
TOKEN_BYTES = 4
MIN_BLOCK, MAX_BLOCK = 16, 4096

Packed = bytes
"""Tokens as little-endian uint32, four bytes each."""


def pack(tokens: Iterable[int]) -> Packed:
    """Tokens to bytes. Raises InvalidInput for a token that is no uint32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidInput("tokens", str(error), "pass integers from 0 to 2**32 - 1") from error
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: Packed) -> Sequence[int]:
    """Bytes back to tokens."""
    tokens = array("I")
    tokens.frombytes(packed)
    if byteorder == "big":
        tokens.byteswap()
    return tokens


class PrefixChain:
    """Digests of all full blocks of one growing token sequence.

    Owns the digests and the unfinished block's tokens; nothing else of the sequence.
    """

    __slots__ = ("_block_bytes", "_state", "_tail", "block_tokens", "digests")

    def __init__(self, block_tokens: int) -> None:
        if not MIN_BLOCK <= block_tokens <= MAX_BLOCK:
            raise InvalidInput(
                "block_tokens", f"{block_tokens} is out of range", f"use {MIN_BLOCK} to {MAX_BLOCK}"
            )
        self.block_tokens = block_tokens
        self.digests: list[PrefixHash] = []
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._state = hashlib.sha256(DOMAIN + block_tokens.to_bytes(4, "little")).digest()
        self._tail = b""

    @property
    def tokens(self) -> int:
        """Tokens hashed or waiting in the unfinished block."""
        return len(self.digests) * self.block_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, packed: Packed) -> Sequence[PrefixHash]:
        """Append tokens; returns the digests of the blocks that became full."""
        data = self._tail + packed if self._tail else packed
        block = self._block_bytes
        full = len(data) - len(data) % block
        first = len(self.digests)
        sha256, state, view = hashlib.sha256, self._state, memoryview(data)
        append = self.digests.append
        for offset in range(0, full, block):
            digest = sha256(state)
            digest.update(view[offset : offset + block])
            state = digest.digest()
            append(PrefixHash(state))
        self._state = state
        self._tail = data[full:]
        return self.digests[first:]

    def fork(self) -> PrefixChain:
        """An independent chain with the same content (a branch of the session)."""
        twin = PrefixChain(self.block_tokens)
        twin.digests = self.digests.copy()
        twin._state = self._state
        twin._tail = self._tail
        return twin

    def tip(self) -> PrefixHash:
        """Digest of the last full block; the domain's own digest when there is none."""
        return PrefixHash(self._state)


def hash_prefix(packed: Packed, block_tokens: int) -> Sequence[PrefixHash]:
    """Digests of all full blocks of `packed`."""
    chain = PrefixChain(block_tokens)
    return chain.extend(packed)
