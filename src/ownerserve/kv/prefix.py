"""A prefix chain has one digest for each full block, each over everything before it.

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
MIN_BLOCK, MAX_BLOCK = 1, 4096
"""Engines use blocks of 16 tokens and more; a simulated one counts in units of a trace's blocks."""

Packed = bytes
"""Tokens as little-endian uint32, four bytes each."""


def pack(tokens: Iterable[int]) -> Packed:
    """Pack tokens into bytes. Raises InvalidInput for a token that is no uint32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidInput("tokens", str(error), "pass integers from 0 to 2**32 - 1") from error
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: Packed) -> array[int]:
    """Unpack bytes into tokens: a copy of the bytes, no object for each token."""
    tokens = array("I")
    tokens.frombytes(packed)
    if byteorder == "big":
        tokens.byteswap()
    return tokens


class PrefixChain:
    """A prefix chain holds the digests of all full blocks of one growing token sequence.

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
        """Count the tokens hashed, or waiting in the unfinished block."""
        return len(self.digests) * self.block_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, packed: Packed) -> Sequence[PrefixHash]:
        """Append tokens; returns the digests of the blocks that became full."""
        data = self._tail + packed if self._tail else packed
        block = self._block_bytes
        full = len(data) - len(data) % block
        first = len(self.digests)
        sha256, state = hashlib.sha256, self._state
        append = self.digests.append
        for offset in range(0, full, block):
            # One call on a joined copy: half the time of update() in two pieces.
            state = sha256(state + data[offset : offset + block]).digest()
            append(PrefixHash(state))
        self._state = state
        self._tail = data[full:]
        return self.digests[first:]

    def follow(self, other: PrefixChain) -> bool:
        """Go on to where `other` is, whose digests are not made again. Returns False, and changes
        nothing, when `other` does not go on from the last full block here; what waits here is
        dropped.
        """
        known = len(self.digests)
        if known > len(other.digests) or (known and other.digests[known - 1] != self.digests[-1]):
            return False
        self.digests += other.digests[known:]
        self._state, self._tail = other._state, other._tail
        return True

    def fork(self) -> PrefixChain:
        """Return an independent chain with the same content (a branch of the session)."""
        twin = self.upto(len(self.digests))
        twin._tail = self._tail  # noqa: SLF001 - its own kind
        return twin

    def upto(self, blocks: int) -> PrefixChain:
        """Return an independent chain of the first `blocks` full blocks."""
        twin = PrefixChain(self.block_tokens)
        if blocks:
            twin.digests = self.digests[:blocks]
            twin._state = twin.digests[-1]
        return twin

    def tip(self) -> PrefixHash:
        """Return the digest of the last full block; the domain's own digest when there is none."""
        return PrefixHash(self._state)


def hash_prefix(packed: Packed, block_tokens: int) -> Sequence[PrefixHash]:
    """Return the digests of all full blocks of `packed`."""
    chain = PrefixChain(block_tokens)
    return chain.extend(packed)


def digests_behind(
    before: PrefixHash | None, packed: Packed, block_tokens: int
) -> Sequence[PrefixHash]:
    """Return the digests of the full blocks of `packed`, which stands behind a prefix whose digest
    is `before` (None: an empty one).
    """
    if len(packed) < block_tokens * TOKEN_BYTES:
        return ()
    chain = PrefixChain(block_tokens)
    if before is not None:
        chain._state = before  # noqa: SLF001 - goes on from there
    return chain.extend(packed)


class HashedPrefix:
    """A hashed prefix holds tokens and the digests of all their full blocks, which were computed
    here and nowhere else.

    So it answers for a digest without hashing again: comparing tokens costs a hundredth of that,
    and of the very bytes that it was made of nothing is compared. Owns both; grown, never rewound.
    """

    __slots__ = ("_block_bytes", "_chain", "_source")

    def __init__(self, block_tokens: int) -> None:
        self._source: Packed = b""
        self._chain = PrefixChain(block_tokens)
        self._block_bytes = self._chain.block_tokens * TOKEN_BYTES

    @property
    def tokens(self) -> Packed:
        """Return the tokens of the full blocks."""
        return self._source[: len(self.digests) * self._block_bytes]

    @property
    def digests(self) -> list[PrefixHash]:
        """Return the digest of each block. The list grows with the prefix; the reader must not
        change it.
        """
        return self._chain.digests

    def grow(self, tokens: Packed) -> bool:
        """Go on to the last full block of `tokens`. Returns False, and changes nothing, when they
        do not begin with what is here.
        """
        if tokens is self._source:
            return True
        known = len(self.digests) * self._block_bytes
        if not tokens.startswith(memoryview(self._source)[:known]):
            return False
        self._chain.extend(tokens[known : len(tokens) - len(tokens) % self._block_bytes])
        self._source = tokens
        return True

    def is_of(self, tokens: Packed) -> bool:
        """Tell whether `tokens` are the very bytes that the prefix was made of last."""
        return tokens is self._source

    def follow(self, other: HashedPrefix) -> bool:
        """Go on to where `other` is, by its digests: nothing is compared or hashed. Returns False,
        and changes nothing, when `other` does not begin with what is here.
        """
        if not self._chain.follow(other._chain):
            return False
        self._source = other._source
        return True

    def branch(self, tokens: Packed) -> HashedPrefix:
        """Return another prefix, of `tokens`: what both begin with is not hashed again."""
        mine, size = memoryview(self._source), self._block_bytes
        low, high = 0, min(len(tokens) // size, len(self.digests))
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(mine[low * size : middle * size], low * size):
                low = middle
            else:
                high = middle - 1
        twin = self._first(low)
        twin.grow(tokens)
        return twin

    def copy(self) -> HashedPrefix:
        """Copy the prefix: it grows apart from now on."""
        return self._first(len(self.digests))

    def _first(self, blocks: int) -> HashedPrefix:
        twin = HashedPrefix(self._chain.block_tokens)
        twin._source, twin._chain = self._source, self._chain.upto(blocks)
        return twin

    def digest_of(self, tokens: Packed) -> PrefixHash | None:
        """Return the digest of `tokens`; None unless they are one or more of its first blocks."""
        blocks, rest = divmod(len(tokens), self._block_bytes)
        if rest or not 0 < blocks <= len(self.digests) or not self._source.startswith(tokens):
            return None
        return self._chain.digests[blocks - 1]

    def fork(self) -> PrefixChain:
        """Return a chain of its own that goes on from here."""
        return self._chain.fork()
