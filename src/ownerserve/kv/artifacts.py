"""This module names KV artifacts: the identity of a model's state, and keys under it.

Owns the id: SHA-256 over everything that changes the bytes' meaning. Must never take in layout
(block size, padding, sharding, engine version): that is a descriptor beside the artifact, which
is converted or refused.

    Identity    model, weights, tokenizer, adapter, spec, numerics, exactness, tenant     per worker
    RangeKey    tokens [start, end) of a prefix, one component                            immutable
    PointKey    what is needed to go on at `position` of a prefix, one component
    id          SHA-256(domain, digest of Identity, key)
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import NewType, TypeAlias

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash

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
    `multimodal` digests inputs that are no tokens (images), empty for text.
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
        return _sha256(IDENTITY_DOMAIN, *fields)


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
