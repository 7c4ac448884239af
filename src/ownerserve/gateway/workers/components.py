"""This module reads what a worker tells people of its device memory, component by component.

Only the reference engine tells it, in the part `device` of its `/ownerserve/status`. No decision
rests on it: what can't be read is not told.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.wire.status import NAMES_MAX, TEXT_MAX, Count


class ComponentMemory(msgspec.Struct, frozen=True, gc=False):
    """A component's memory is its pool on the device, in bytes; `free` ones are unused now."""

    component: str
    bytes_total: int
    bytes_free: int


class _Device(msgspec.Struct, frozen=True):
    """The part `device` of the record, of which slots are read here."""

    slots: dict[str, Count]
    free_slots: dict[str, Count]
    slot_bytes: dict[str, Count]


class _Record(msgspec.Struct, frozen=True):
    device: _Device | None = None


_decoder = msgspec.json.Decoder(_Record)


def read_components(document: bytes) -> tuple[ComponentMemory, ...]:
    """Return the components in a worker's status, in its order; none when it tells none that can be
    used."""
    try:
        device = _decoder.decode(document).device
    except UNREADABLE:
        return ()
    if device is None or len(device.slots) > NAMES_MAX:
        return ()
    return tuple(
        ComponentMemory(name, slots * size, min(device.free_slots[name], slots) * size)
        for name, slots in device.slots.items()
        if len(name) <= TEXT_MAX
        and name in device.free_slots
        and (size := device.slot_bytes.get(name)) is not None
    )
