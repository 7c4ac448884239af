"""These are the store's words: what a record says of itself, what a caller asks for, what can come
of it.

Pure data. Nothing here knows how or where bytes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import (
    ArtifactKey,
    Exact,
    Identity,
    Numerics,
    PointKey,
    RangeKey,
    artifact_id,
)

ID_BYTES = 32
MAX_COMPONENT, MAX_PRECISION, MAX_EXACTNESS = 32, 16, 32
MAX_UNITS = 1 << 16
SHARED = b""
"""The tenant of an artifact that belongs to no tenant."""


class ArtifactKind(IntEnum):
    """An artifact is of one of two kinds. Range: global KV of tokens [a, b). Point: the state
    needed to go on at one boundary.
    """

    RANGE = 1
    POINT = 2


class Meta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A meta is what a record says of itself; all of it stands in the record's header.

    The payload is `units` equal pieces (blocks of B tokens), so that tokens [x, y) of a record
    over [a, b) can be read alone:

        tokens   a ........ a+B ........ a+2B ........ b
        payload  |  unit 0  |  unit 1    |  unit 2     |
        hashes   |  boundaries[0:32]  [32:64]     prefix_hash

    `boundaries` holds the prefix hashes at the inner unit ends (empty when nobody will look for
    them): by those a branch finds the part of a long record that it shares.
    `descriptor` is the physical layout, opaque here: equal, convertible by the reader, or refused.
    No owner is named: sealed state is taken for what it is, whoever wrote it.
    """

    id: bytes
    kind: ArtifactKind
    component: str
    prefix_hash: bytes
    first_token: int
    end_token: int
    tenant: bytes = SHARED
    first_layer: int = 0
    end_layer: int = 0
    precision: str = ""
    exactness: str = "exact"
    descriptor: bytes = b""
    units: int = 1
    boundaries: bytes = b""

    def check(self) -> None:
        """Raise InvalidInput for what no header can hold."""
        for field, value in (("id", self.id), ("prefix_hash", self.prefix_hash)):
            if len(value) != ID_BYTES:
                raise InvalidInput(field, f"{len(value)} bytes", f"give {ID_BYTES}")
        if self.tenant and len(self.tenant) != ID_BYTES:
            raise InvalidInput("tenant", f"{len(self.tenant)} bytes", f"give 0 or {ID_BYTES}")
        if self.tenant and not any(self.tenant):
            raise InvalidInput("tenant", "all zeros", "zeros in a header mean no tenant; salt it")
        for field, text, limit in (
            ("component", self.component, MAX_COMPONENT),
            ("precision", self.precision, MAX_PRECISION),
            ("exactness", self.exactness, MAX_EXACTNESS),
        ):
            if len(text.encode()) > limit or "\0" in text:
                raise InvalidInput(field, repr(text), f"use at most {limit} bytes and no NUL")
        if not 0 <= self.first_token <= self.end_token < 1 << 63:
            raise InvalidInput("tokens", f"[{self.first_token}, {self.end_token})", "order them")
        if not 0 <= self.first_layer <= self.end_layer < 1 << 16:
            raise InvalidInput("layers", f"[{self.first_layer}, {self.end_layer})", "order them")
        if not 1 <= self.units <= MAX_UNITS:
            raise InvalidInput("units", f"{self.units}", f"use 1 to {MAX_UNITS}")
        if self.boundaries and len(self.boundaries) != (self.units - 1) * ID_BYTES:
            raise InvalidInput("boundaries", f"{len(self.boundaries)} bytes", "one per inner unit")


def unit_ends(meta: Meta) -> Iterator[tuple[bytes, int]]:
    """Yield (prefix hash, units up to it) of each unit end, for a record that lists them.

    Others are found by id alone. The last end is the record's own.
    """
    ends = meta.boundaries + meta.prefix_hash
    for unit in range(meta.units if meta.boundaries else 0):
        yield ends[unit * ID_BYTES : (unit + 1) * ID_BYTES], unit + 1


def meta_of(
    identity: Identity, key: ArtifactKey, *, tenant: bytes = SHARED, units: int = 1
) -> Meta:
    """Return the meta of an artifact under its true id. What is physical is the caller's to add:

        msgspec.structs.replace(meta_of(...), descriptor=..., end_layer=...)

    `tenant` is the identity's salt for an artifact that only its tenant may read, else SHARED.
    """
    match key:
        case RangeKey():
            kind, first, end = ArtifactKind.RANGE, key.start, key.end
        case PointKey():
            kind, first, end = ArtifactKind.POINT, key.position, key.position
    exact = identity.exactness
    return Meta(
        id=artifact_id(identity.digest(), key),
        kind=kind,
        component=key.component,
        prefix_hash=key.prefix_hash,
        first_token=first,
        end_token=end,
        tenant=tenant,
        precision=_label(identity.numerics),
        exactness="exact" if isinstance(exact, Exact) else f"approximate/{exact.kind}",
        units=units,
    )


def _label(numerics: Numerics) -> str:
    """Return what a listing shows of the numerics, as far as a header has room; the id says all."""
    quantization, dtype = numerics.quantization, numerics.dtype
    label = quantization if 0 < len(quantization.encode()) <= MAX_PRECISION else dtype
    return label.encode()[:MAX_PRECISION].decode(errors="ignore")


class Want(msgspec.Struct, frozen=True, gc=False):
    """A want is one artifact, or units [first_unit, end_unit) of it, that a restore needs.

    `descriptor`, when given, is the only layout the reader takes; None leaves it to the reader.
    """

    id: bytes
    first_unit: int = 0
    end_unit: int | None = None
    descriptor: bytes | None = None


class TierUsage(NamedTuple):
    """A usage counts the bytes and records that stand in a tier, of one tenant and kind or of
    all.
    """

    stored_bytes: int = 0
    records: int = 0


class Listed(msgspec.Struct, frozen=True):
    """Listed is a record as a tier's catalogue shows it; `stored_bytes` counts header and
    padding.
    """

    meta: Meta
    payload_bytes: int
    stored_bytes: int
    touched_s: float
    reuse_count: int = 0
    restore_cost_ms: float = 0.0


class ReadPart(msgspec.Struct, frozen=True, gc=False):
    """A part is the verified bytes of one want."""

    meta: Meta
    data: memoryview


class MissReason(StrEnum):
    """A MissReason says why a read gave nothing. Every one of them is safe: the caller
    recomputes.
    """

    ABSENT = "absent"
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    FOREIGN_LAYOUT = "foreign_layout"
    OTHER_FORMAT = "other_format"
    NO_KEY = "no_key"
    BAD_RANGE = "bad_range"
    BUSY = "busy"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


class RefusalReason(StrEnum):
    """A RefusalReason says why a write was not taken. Nothing of the write is left behind."""

    NO_SPACE = "no_space"
    QUOTA = "quota"
    WRITE_BUDGET = "write_budget"
    LOW_UTILITY = "low_utility"
    TOO_LARGE = "too_large"
    NO_KEY = "no_key"
    IO_ERROR = "io_error"
    BUSY = "busy"
    CLOSED = "closed"


class ReadHit(msgspec.Struct, frozen=True):
    """The read gave all wants, in order, each verified; `tier` names the tier that had them."""

    parts: tuple[ReadPart, ...]
    tier: str = ""


class ReadMiss(msgspec.Struct, frozen=True):
    """The read gave nothing: `id` is the first artifact that failed, for `reason`."""

    reason: MissReason
    id: bytes = b""


class WriteDone(msgspec.Struct, frozen=True):
    """The record is durable, as far as its tier is, and readable; `stored_bytes` is what it
    occupies.
    """

    id: bytes
    stored_bytes: int


class AlreadyStored(msgspec.Struct, frozen=True):
    """An equal id is already there. Sealed is immutable: the first copy stays."""

    id: bytes


class WriteRefused(msgspec.Struct, frozen=True):
    """The write was not taken, for `reason`; nothing of it is left behind."""

    reason: RefusalReason
    id: bytes = b""


ReadOutcome = ReadHit | ReadMiss
WriteOutcome = WriteDone | AlreadyStored | WriteRefused
