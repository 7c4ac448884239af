"""How the bytes of each component's records lie, as the store's reader can convert them. Pure.

    kv.payload       | part 0, layer 0 | layer 1 | ... | part 1, layer 0 | ...
    store.convert    | page 0          | page 1  | ... | page L          | ...

What is stored is the canonical payload: the engine named in a description is its format, and its
"layers" are the arrays of all parts, one for each layer. Only what is true of the bytes is said:
where parts differ in shape, or padding lies between them, a unit is one page with one entry, which
can be taken as it is, turned in byte order if its scalars are alike, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.payload import ITEM_BYTES, PayloadPart
from ownerserve.kv.specs import Coverage
from ownerserve.store.format.convert import ByteOrder
from ownerserve.store.format.convert import Layout as Description

Parts = Mapping[str, Sequence[PayloadPart]]
"""The arrays of a unit, by component."""

ANY_VERSION = ""
"""The canonical payload does not depend on which version of an engine computed it."""
MIXED = "mixed"


def descriptors(layout: Layout, parts: Parts, *, form: str) -> dict[str, bytes]:
    """Each component's descriptor. `form` is like "payload/1": a name, and a number that changes
    when the layout does."""
    name, _, version = form.rpartition("/")
    if not name or not version.isdecimal():
        raise InvalidInput("engine", f"{form!r}", 'name a layout and its version: "payload/1"')
    return {
        component.name: _describe(
            _opaque(component, layout.block_tokens, name=name, version=int(version)),
            tuple(parts.get(component.name, ())),
            is_range=component.coverage is Coverage.RANGE,
        ).encode()
        for component in layout.components
    }


def _opaque(component: Component, block_tokens: int, *, name: str, version: int) -> Description:
    """A unit as one page with one entry: true of whatever is in it."""
    return Description(
        engine=name,
        engine_version=ANY_VERSION,
        layout_version=version,
        first_layer=0,
        end_layer=1,
        shard=0,
        shards=1,
        block_tokens=block_tokens,
        entries=1,
        entry_bytes=component.slot_bytes,
        page_bytes=component.slot_bytes,
        scalar=MIXED,
        scalar_bytes=0,
        byte_order=ByteOrder.LITTLE,
    )


def _describe(opaque: Description, parts: Sequence[PayloadPart], *, is_range: bool) -> Description:
    """What more can be said, given the arrays."""
    types = {part.dtype for part in parts}
    if len(types) != 1:
        return opaque
    scalar, unit_bytes = types.pop(), opaque.page_bytes
    typed = msgspec.structs.replace(opaque, scalar=scalar, scalar_bytes=ITEM_BYTES[scalar])
    padding = unit_bytes - sum(part.payload_bytes for part in parts)
    if padding and len(parts) == 1:  # at the end
        return msgspec.structs.replace(typed, entry_bytes=unit_bytes - padding)
    shapes = {part.shape for part in parts}
    if padding or len(shapes) > 1:
        return typed
    layers, rows = shapes.pop()[:2]
    pages = len(parts) * layers
    entries = rows if is_range and opaque.block_tokens % rows == 0 else 1
    page_bytes = unit_bytes // pages
    return msgspec.structs.replace(
        typed,
        end_layer=pages,
        entries=entries,
        entry_bytes=page_bytes // entries,
        page_bytes=page_bytes,
    )
