"""Prefixes and artifacts are named by what is in them: a chain of digests over a prompt's tokens,
and under a model's identity the ids of the state that they leave.

    digest[i] = SHA-256(digest[i-1] || tokens of block i as little-endian uint32)
    digest[-1] = SHA-256(DOMAIN || block size)

Equal digests mean equal prefixes at equal block size. Only full blocks have one; the tail of a
prompt that does not fill a block is not addressable. A chain is grown, never rewound: a turn
hashes only what it adds.

    Identity    model, weights, tokenizer, adapter, spec, numerics, exactness, tenant     per worker
    RangeKey    tokens [start, end) of a prefix, one component                            immutable
    PointKey    what is needed to go on at `position` of a prefix, one component
    id          SHA-256(domain, digest of Identity, key)

An id is over everything that changes the bytes' meaning. It must never take in layout (block size,
padding, sharding, engine version): that is a descriptor beside the artifact, which is converted or
refused.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from sys import byteorder
from typing import NewType, TypeAlias

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash

DOMAIN = b"ownerserve/prefix/1"
SALT_DOMAIN = b"ownerserve/cache-salt/1"
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


SALTED_TOKENS = 16
"""So many tokens at the beginning of a prefix bear its salt: 11 bits each."""
SALTED_VOCABULARY = 1 << 20
"""Tokens of a salted prefix lie below; the bits above are the salt's."""


class PrefixSalt:
    """A salt parts prefixes: equal tokens under two salts are two prefixes, for whoever compares or
    hashes them.

        token     |0 0 0 0 0 0 0 0 0 0 0 0|token, 20 bits|     of each of the first 16
        salted    |1|  11 bits of salt    |token         |     so it is no unsalted one's either

    An engine computes with plain tokens; tree, chains, records and names have the salted ones.
    """

    __slots__ = ("_mask",)

    def __init__(self, salt: str) -> None:
        drawn = hashlib.shake_256(SALT_DOMAIN + salt.encode("utf-8", "surrogatepass"))
        words = unpack(drawn.digest(SALTED_TOKENS * TOKEN_BYTES))
        self._mask = pack((word & 0x7FF | 0x800) << 20 for word in words) if salt else b""

    def turned(self, packed: Packed, at: int) -> Packed:
        """Return `packed`, which stands at position `at` of its sequence, with its salt, or without
        it where it had it."""
        mask = self._mask[at * TOKEN_BYTES :]
        if not mask or not packed:
            return packed
        count = min(len(mask), len(packed))
        both = int.from_bytes(packed[:count], "big") ^ int.from_bytes(mask[:count], "big")
        return both.to_bytes(count, "big") + packed[count:]


NO_SALT = PrefixSalt("")
"""What all share."""


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
        twin = type(self)(self.block_tokens)
        if blocks:
            twin.digests = self.digests[:blocks]
            twin._state = twin.digests[-1]  # noqa: SLF001 - its own kind
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

    def __init__(self, block_tokens: int, *, chain: type[PrefixChain] = PrefixChain) -> None:
        """`chain` makes the digests: where tokens name their prefix by themselves (the simulator)
        nothing is hashed."""
        self._source: Packed = b""
        self._chain = chain(block_tokens)
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
        twin = self.beginning_of(tokens)
        twin.grow(tokens)
        return twin

    def beginning_of(self, tokens: Packed) -> HashedPrefix:
        """Return another prefix, of the full blocks that both this one and `tokens` begin with;
        nothing is hashed."""
        mine, size = memoryview(self._source), self._block_bytes
        low, high = 0, min(len(tokens) // size, len(self.digests))
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(mine[low * size : middle * size], low * size):
                low = middle
            else:
                high = middle - 1
        return self._first(low)

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


# ---- ids of artifacts


ArtifactId = NewType("ArtifactId", bytes)
"""32 bytes; equal ids mean interchangeable state."""

IDENTITY_DOMAIN = b"ownerserve/identity/1"
ARTIFACT_DOMAIN = b"ownerserve/artifact/1"
SALT_BYTES = 32
SHA256_BYTES = 32


class Approximation(StrEnum):
    """An approximation is a way in which state may differ from that of a cold run."""

    BOUNDED_REPLAY = "bounded_replay"


class Exact(msgspec.Struct, frozen=True, tag="exact"):
    """Exact state has the same inputs and numerics as a cold run's, and its logits within the
    stated tolerance.
    """


class Approximate(msgspec.Struct, frozen=True, tag="approximate"):
    """Approximate state was made by a shortcut of `kind`; it is never published under the exact id
    of the same prefix.
    """

    kind: Approximation


Exactness: TypeAlias = Exact | Approximate


class Numerics(msgspec.Struct, frozen=True):
    """Numerics say how values were computed: compute dtype, quantisation of the weights, RoPE
    scaling.

    `rope_scaling` is the config's object in canonical JSON; empty when there is none. Positions
    are absolute in this project, so a prefix has one rotation.
    """

    dtype: str
    quantization: str = ""
    rope_scaling: str = ""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """An identity is everything but the prefix that the meaning of state bytes depends on.

    `weights` is a digest, or a revision that names one; `tenant_salt` is made by `tenant_salt`;
    `multimodal` digests inputs that are no tokens (images), empty for text. `config` is what the
    model's config says of its state, in canonical JSON, with whatever overrides it; empty where
    nothing is known of it.
    """

    model_id: str
    weights: str
    tokenizer: str
    spec_digest: bytes
    numerics: Numerics
    tenant_salt: bytes
    adapter: str = ""
    multimodal: bytes = b""
    exactness: Exactness = Exact()
    config: str = ""

    def __post_init__(self) -> None:
        for field in ("model_id", "weights", "tokenizer"):
            if not getattr(self, field):
                raise InvalidInput(f"identity.{field}", "is empty", "state it; it can't be guessed")
        if len(self.tenant_salt) != SALT_BYTES:
            raise InvalidInput(
                "identity.tenant_salt", f"{len(self.tenant_salt)} bytes", f"give {SALT_BYTES}"
            )

    def digest(self) -> bytes:
        """Return the SHA-256 over all fields, each with its length, so that none runs into the
        next.
        """
        exact = self.exactness
        fields = (
            self.model_id.encode(),
            self.weights.encode(),
            self.tokenizer.encode(),
            self.adapter.encode(),
            self.multimodal,
            self.spec_digest,
            self.numerics.dtype.encode(),
            self.numerics.quantization.encode(),
            self.numerics.rope_scaling.encode(),
            b"exact" if isinstance(exact, Exact) else b"approximate/" + exact.kind.encode(),
            self.tenant_salt,
        )
        # Without a config the name is as it was before there was this field.
        return _sha256(IDENTITY_DOMAIN, *fields, *filter(None, [self.config.encode()]))


class RangeKey(msgspec.Struct, frozen=True, tag="range"):
    """A range key names one component's entries of tokens [start, end); `prefix_hash` is the
    chain's tip at `end`.
    """

    prefix_hash: PrefixHash
    start: int
    end: int
    component: str

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidInput("range", f"[{self.start}, {self.end})", "start below end")


class PointKey(msgspec.Struct, frozen=True, tag="point"):
    """A point key names one component's state at `position`, a boundary; `prefix_hash` is the
    chain's tip there.
    """

    prefix_hash: PrefixHash
    position: int
    component: str

    def __post_init__(self) -> None:
        if self.position < 1:
            raise InvalidInput("position", f"{self.position}", "use a boundary above 0")


ArtifactKey: TypeAlias = RangeKey | PointKey


def artifact_id(identity_digest: bytes, key: ArtifactKey) -> ArtifactId:
    """Return the id of `key` under an identity; pass `Identity.digest()` computed once."""
    match key:
        case RangeKey():
            where = (b"range", _uint64(key.start), _uint64(key.end))
        case PointKey():
            where = (b"point", _uint64(key.position), b"")
    parts = (identity_digest, key.prefix_hash, *where, key.component.encode())
    return ArtifactId(_sha256(ARTIFACT_DOMAIN, *parts))


class ArtifactIds:
    """ArtifactIds makes the `artifact_id`s of one component under one identity, many at a time: at
    two fifths of the cost, since all that does not change is laid out once.
    """

    __slots__ = ("_after_point", "_before_point", "_before_range", "_component", "_head")

    def __init__(self, identity_digest: bytes, component: str) -> None:
        name = component.encode()
        self._head = ARTIFACT_DOMAIN + _sized(identity_digest) + _uint64(SHA256_BYTES)
        self._before_range = _sized(b"range") + _uint64(8)
        self._before_point = _sized(b"point") + _uint64(8)
        self._component = _sized(name)
        self._after_point = _uint64(0) + self._component

    def range(self, prefix_hash: PrefixHash, start: int, end: int) -> ArtifactId:
        """Return the id of RangeKey(prefix_hash, start, end, component)."""
        return self.at(prefix_hash, self.place(start, end))

    def place(self, start: int, end: int) -> bytes:
        """Return what the ids of [start, end) have in common, whatever the prefix: for `at`."""
        key = self._before_range + start.to_bytes(8, "little") + _EIGHT + end.to_bytes(8, "little")
        return key + self._component

    def at(self, prefix_hash: PrefixHash, place: bytes) -> ArtifactId:
        """Return the id of the range artifact of that prefix at a `place`."""
        return ArtifactId(hashlib.sha256(self._head + prefix_hash + place).digest())

    def each(
        self, prefix_hashes: Iterable[PrefixHash], places: Iterable[bytes]
    ) -> Sequence[ArtifactId]:
        """Return the ids of the range artifacts of those prefixes, each at its place."""
        return list(map(self.at, prefix_hashes, places))

    def point(self, prefix_hash: PrefixHash, position: int) -> ArtifactId:
        """Return the id of PointKey(prefix_hash, position, component)."""
        key = self._before_point + position.to_bytes(8, "little") + self._after_point
        return ArtifactId(hashlib.sha256(self._head + prefix_hash + key).digest())


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Return the HMAC-SHA-256 of the tenant's name: ids of one tenant say nothing about another's.
    Raises InvalidInput for a `secret` that is too short.
    """
    if len(secret) < SALT_BYTES:
        raise InvalidInput("secret", f"{len(secret)} bytes", f"use {SALT_BYTES} or more")
    return hmac.digest(secret, tenant.encode(), "sha256")


def _uint64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _sized(field: bytes) -> bytes:
    return _uint64(len(field)) + field


_EIGHT = _uint64(8)


def _sha256(domain: bytes, *fields: bytes) -> bytes:
    digest = hashlib.sha256(domain)
    for field in fields:
        digest.update(_uint64(len(field)))
        digest.update(field)
    return digest.digest()
