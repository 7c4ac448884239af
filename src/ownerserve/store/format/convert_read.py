"""A read of a record that lies in another layout: the units that are needed, verified, converted.

The hook of the read path: called when a tier answers `foreign_layout`. What can't be converted is
that same miss, with the reason logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import msgspec

from ownerserve.store.format.convert import (
    PayloadLayout,
    Unconvertible,
    UnitRange,
    convert,
    decode,
    obstacle,
    source_span,
)
from ownerserve.store.format.model import (
    ArtifactKind,
    Listed,
    Meta,
    MissReason,
    ReadMiss,
    ReadOutcome,
    ReadPart,
    Want,
)

log = logging.getLogger("ownerserve.store")


def read_converted(
    read: Callable[[Want], ReadOutcome], want: Want, record: Listed
) -> ReadPart | ReadMiss:
    """`want` in the layout it names, from a record whose catalogue entry is `record`.

    The part's meta is what the part is, not what is stored: units and descriptor are the wanted.
    """
    stored, wanted = decode(record.meta.descriptor), decode(want.descriptor or b"")
    if stored is None or wanted is None:
        return _refused(want, record, Unconvertible.UNKNOWN_FORM)
    reason = obstacle(stored, wanted) or _misfit(stored, record.meta)
    target = _target(want, record.meta, stored, wanted)
    source = reason or source_span(stored, wanted, target, record.meta.units)
    if isinstance(source, Unconvertible):
        return _refused(want, record, source)
    # What was converted must be what the catalogue described: the header's own word decides.
    outcome = read(Want(want.id, source.first, source.end, record.meta.descriptor))
    if isinstance(outcome, ReadMiss):
        return outcome
    part = outcome.parts[0]
    if (part.meta.units, part.meta.first_token) != (record.meta.units, record.meta.first_token):
        return _refused(want, record, Unconvertible.INCONSISTENT)
    data = convert(part.data, stored, wanted, source=source, target=target)
    if isinstance(data, Unconvertible):
        return _refused(want, record, data)
    units = part.meta.units * stored.block_tokens // wanted.block_tokens
    inner = part.meta.boundaries if units == part.meta.units else b""
    descriptor = want.descriptor or b""
    meta = msgspec.structs.replace(part.meta, descriptor=descriptor, units=units, boundaries=inner)
    return ReadPart(meta, data)


def _misfit(stored: PayloadLayout, meta: Meta) -> Unconvertible | None:
    """A range whose blocks are not its tokens is described wrongly, whatever its bytes are."""
    tokens = meta.end_token - meta.first_token
    fits = meta.kind is ArtifactKind.POINT or meta.units * stored.block_tokens == tokens
    return None if fits else Unconvertible.INCONSISTENT


def _target(want: Want, meta: Meta, stored: PayloadLayout, wanted: PayloadLayout) -> UnitRange:
    end = want.end_unit
    if end is None:
        end = meta.units * stored.block_tokens // wanted.block_tokens
    return UnitRange(want.first_unit, end, meta.first_token, meta.kind is ArtifactKind.POINT)


def _refused(want: Want, record: Listed, reason: Unconvertible) -> ReadMiss:
    _tell_once(record.meta.descriptor, want.descriptor or b"", reason)
    return ReadMiss(MissReason.FOREIGN_LAYOUT, want.id)


@lru_cache(maxsize=256)
def _tell_once(stored: bytes, wanted: bytes, reason: Unconvertible) -> None:
    log.warning(
        "records in another layout are not used (%s): stored as %s, wanted as %s",
        reason,
        decode(stored) or stored.hex(),
        decode(wanted) or wanted.hex(),
    )
