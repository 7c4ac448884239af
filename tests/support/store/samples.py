"""Small artifacts by a number."""

from __future__ import annotations

import hashlib
from typing import Any

from ownerserve.store.format.model import ArtifactKind, Meta, ReadHit, Want
from ownerserve.store.tiers.backend import TierBackend


def digest(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


class Samples:
    """Artifacts by a number: same number, same meta, same bytes."""

    @staticmethod
    def meta(number: object, kind: ArtifactKind = ArtifactKind.RANGE, **changes: Any) -> Meta:
        fields: dict[str, Any] = {
            "id": digest(("id", number)),
            "kind": kind,
            "component": "csa_main",
            "prefix_hash": digest(("prefix", number)),
            "first_token": 0 if kind is ArtifactKind.RANGE else 1024,
            "end_token": 1024,
            "end_layer": 61,
            "precision": "fp8",
            "descriptor": b'{"block":128}',
        }
        return Meta(**fields | changes)

    @staticmethod
    def payload(number: object, count: int = 10_000) -> bytes:
        seed = digest(("payload", number))
        return (seed * (count // 32 + 1))[:count]

    @staticmethod
    def read(tier: TierBackend, *numbers: object) -> list[bytes] | str:
        """The bytes of these artifacts, or the reason of the miss."""
        outcome = tier.read([Want(digest(("id", number))) for number in numbers])
        if isinstance(outcome, ReadHit):
            return [bytes(part.data) for part in outcome.parts]
        return str(outcome.reason)


def bytes_held(tier: TierBackend, id_: bytes) -> memoryview:
    """The very bytes that a tier in memory holds of a sound artifact, to write into."""
    outcome = tier.read([Want(id_)])
    assert isinstance(outcome, ReadHit)
    (part,) = outcome.parts
    return memoryview(part.data.obj).cast("B")[: len(part.data)]
