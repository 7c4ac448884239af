"""The whole of a model's state is the same however many ranks it is cut into."""

from __future__ import annotations

import pytest

from ownerserve.engines.vllm.layout.whole import model_heads, whole
from ownerserve.kv.frame import (
    CONV,
    DENSE,
    MLA,
    RECURRENT,
    WINDOW,
    Payload,
    PayloadPart,
    PayloadSection,
)

B, DIM, KV_HEADS, STATES, CHANNELS = 32, 4, 8, 16, 64


def rank_of(ranks: int) -> Payload:
    """What one of so many ranks keeps: of more ranks than heads, several have the same one."""
    shapes = {
        DENSE: (2, B, max(1, KV_HEADS // ranks), DIM),
        WINDOW: (2, 7, max(1, KV_HEADS // ranks), DIM),
        MLA: (2, B, DIM),
        CONV: (2, CHANNELS // ranks, 3),
        RECURRENT: (2, STATES // ranks, DIM, DIM),
    }
    sections = tuple(
        PayloadSection(name, (PayloadPart("p", shape, "float32"),))
        for name, shape in shapes.items()
    )
    return Payload(B, ("some",), sections)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_state_is_named_by_the_whole_of_it(ranks: int) -> None:
    payload = rank_of(ranks)
    heads = model_heads(payload.sections, ranks=ranks, kv_heads=KV_HEADS)
    assert heads == {DENSE: KV_HEADS, WINDOW: KV_HEADS, RECURRENT: STATES}
    assert whole(payload, heads, ranks=ranks).digest() == rank_of(1).digest()


def test_a_rank_without_siblings_has_all() -> None:
    payload = rank_of(1)
    assert whole(payload, model_heads(payload.sections, ranks=1, kv_heads=1), ranks=1) == payload
