"""Worlds that several plan tests live in: models, prices, engines, and a brute-force oracle."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState, Overlap

# V4-Pro and Gemma-3-27B as research/hybrid-kv.md §1.3 and §2 give them.
V4_PRO = ModelState(
    layers=61,
    block_tokens=128,
    range_bytes_per_token=5511.0,
    point_bytes=5_140_000,
    exact_replay_tokens=7747,
    bounded_replay_tokens=128,
)
GEMMA = ModelState(
    layers=62,
    block_tokens=16,
    range_bytes_per_token=81_920.0,
    point_bytes=435_000_000,
    exact_replay_tokens=53_196,
    bounded_replay_tokens=1024,
)
QWEN_NEXT = ModelState(
    layers=48, block_tokens=16, range_bytes_per_token=24_576.0, point_bytes=77_000_000
)
DENSE = ModelState(layers=48, block_tokens=16, range_bytes_per_token=98_304.0)

# One pass of 5 ms, 60 000 tokens/s at position 0, attention doubling that at 28k tokens.
PREFILL = Coefficients(5.0, 0.0167, 1.2e-6)
MEDIA = {
    Tier.HOST: Medium(0.05, 50e6),
    Tier.DISK: Medium(0.3, 3e6),
    Tier.REMOTE: Medium(8.0, 1e6),
}

SERIAL = msgspec.structs.replace(FULL_ABILITIES, overlap=Overlap.NONE, can_reserve=False)


@pytest.fixture
def costs() -> CostModel:
    return CostModel(Defaults("test", PREFILL, MEDIA))


@pytest.fixture
def world() -> SimpleNamespace:
    """Models, media and engines by name."""
    return SimpleNamespace(
        v4_pro=V4_PRO,
        gemma=GEMMA,
        qwen_next=QWEN_NEXT,
        dense=DENSE,
        prefill=PREFILL,
        media=MEDIA,
        serial=SERIAL,
        full=FULL_ABILITIES,
    )
