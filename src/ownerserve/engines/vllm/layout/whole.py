"""The whole of a model's state, over all tensor-parallel ranks: how many heads there are, and the
payload that a single rank would have. Pure.

    a rank's section    [layers, B, its heads, dim]
    the whole           [layers, B, all heads, dim]    what state is named by, however it is cut

Pages that are kept as bytes are each rank's own: there is no whole of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ownerserve.kv.frame import CONV, RECURRENT, Payload, PayloadPart, PayloadSection
from ownerserve.transfer.layout.heads import HEAD_AXIS, heads_of

CHANNELS = 1
"""The axis of a convolution's part that counts channels."""


def model_heads(sections: Iterable[PayloadSection], *, ranks: int, kv_heads: int) -> dict[str, int]:
    """Return how many heads the model has of each section that is cut by heads, of which one of
    `ranks` is given. A rank with one head may share it with others: the model's `kv_heads` say
    so."""
    found = dict[str, int]()
    for section in sections:
        if section.name in HEAD_AXIS:
            own = heads_of(section)
            is_shared = own == 1 and section.name != RECURRENT
            found[section.name] = min(ranks, kv_heads) if is_shared else own * ranks
    return found


def whole(payload: Payload, heads: Mapping[str, int], *, ranks: int) -> Payload:
    """Return the payload of one rank that has all `heads`."""
    sections = tuple(_whole(section, heads, ranks) for section in payload.sections)
    return msgspec.structs.replace(payload, sections=sections)


def _whole(section: PayloadSection, heads: Mapping[str, int], ranks: int) -> PayloadSection:
    if section.name == CONV:
        parts = [_with(part, CHANNELS, part.shape[CHANNELS] * ranks) for part in section.parts]
    elif section.name in heads:
        axis = HEAD_AXIS[section.name]
        parts = [_with(part, axis, heads[section.name]) for part in section.parts]
    else:
        return section
    return PayloadSection(section.name, tuple(parts))


def _with(part: PayloadPart, axis: int, count: int) -> PayloadPart:
    shape = (*part.shape[:axis], count, *part.shape[axis + 1 :])
    return msgspec.structs.replace(part, shape=shape)
