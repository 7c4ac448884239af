"""What a turn would go on from, foretold by what is held of its session."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from ownerserve.kv.messages import Tier
from ownerserve.node.restore.foretelling import planned_tokens
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import PREFILL, Coefficients, Medium, Prices
from ownerserve.plan.inputs import VLLM, ModelState
from ownerserve.plan.restore import Planner

DENSE = ModelState(layers=4, block_tokens=32, range_bytes_per_token=1000.0)
WINDOWS = ModelState(layers=4, block_tokens=32, range_bytes_per_token=500.0, point_bytes=100_000)
RECURRENT = ModelState(layers=4, block_tokens=32, range_bytes_per_token=0.0, point_bytes=100_000)
ON_A_CPU = msgspec.structs.replace(VLLM, landing_tier=Tier.DEVICE)
DISK = 1e6
"""Bytes a ms: 1,000 tokens of DENSE take one."""


def prices(*, token_ms: float, bytes_per_ms: float = DISK) -> Prices:
    media = {Tier.DISK: Medium(0.0, bytes_per_ms)}
    return CostModel(Defaults("test", Coefficients(1.0, token_ms, 0.0), media)).prices()


@pytest.mark.parametrize("model", [DENSE, WINDOWS, RECURRENT])
@pytest.mark.parametrize(
    ("token_ms", "resident", "stored", "planned"),
    [
        (0.1, 0, {Tier.DISK: 1024}, 1024),  # computing 1,024 takes 100 ms, loading 1
        (0.1, 96, {Tier.DISK: 1024}, 1024),
        (1e-6, 0, {Tier.DISK: 1024}, 0),
        (1e-6, 96, {Tier.DISK: 1024}, 96),  # what is on the device costs nothing
        (0.1, 1024, {Tier.DISK: 1024}, 1024),
        (0.1, 1024, {}, 1024),
        (0.1, 0, {Tier.HOST: 0, Tier.DISK: 0}, 0),
        (0.1, 0, {Tier.REMOTE: 1024}, 0),  # nobody has priced it
    ],
)
def test_the_engine_goes_on_where_its_planner_says(
    model: ModelState, token_ms: float, resident: int, stored: Mapping[Tier, int], planned: int
) -> None:
    planner = Planner(model, ON_A_CPU)
    at = prices(token_ms=token_ms)
    foretold = planned_tokens(planner, at, tokens=1400, resident=resident, stored=stored)
    assert foretold == planned


def test_prices_that_were_badly_wrong_do_not_decide_here_either() -> None:
    """As for the turn itself: where they can't be told apart, less is computed."""
    told = {"tokens": 1400, "resident": 0, "stored": {Tier.DISK: 1024}}
    at = prices(token_ms=0.0005)
    assert planned_tokens(Planner(DENSE, ON_A_CPU), at, **told) == 0
    doubted = msgspec.structs.replace(at, untrusted={PREFILL: 4.0})
    assert planned_tokens(Planner(DENSE, ON_A_CPU), doubted, **told) == 1024
