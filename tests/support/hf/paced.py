"""A worker whose steps take as long as it is told, by prices that say so, on any machine.

    python -m tests.support.hf.paced worker ...      `ownerserve worker ...`, so paced

A step takes STEP_MS, and TOKEN_MS for each token of a prompt in it, beside its compute: so a
simulated worker's pace says what this one does, but for what a tiny model computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ownerserve.engines.hf.model.runner import ModelRunner
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from tests.support.hf.assumed import assume_prices

TOKEN_MS, STEP_MS = 1.0, 20.0
PEER = Medium(2.0, 1e6)
"""What a peer's state is taken to cost: 1 GB/s."""
PRICES = Defaults(
    "as it is paced",
    Coefficients(0.0, TOKEN_MS, 0.0),
    {
        Tier.HOST: Medium(0.05, 4e6),
        Tier.PEER: PEER,
        Tier.DISK: Medium(0.5, 1e6),
        Tier.REMOTE: Medium(8.0, 1e5),
    },
)


def pace() -> None:
    """Have each step of this process take its time."""
    decode, prefill = ModelRunner.decode, ModelRunner.prefill
    decoded: list[None] = []  # in the step under way, which decodes first

    def decode_slowly(self: ModelRunner, rows: Sequence[Any]) -> Any:
        decoded[:] = [None]
        time.sleep(STEP_MS / 1e3)
        return decode(self, rows)

    def prefill_slowly(
        self: ModelRunner, table: Any, tokens: Sequence[int], start: int, **more: Any
    ) -> Any:
        step_ms = 0.0 if decoded else STEP_MS
        decoded.clear()
        time.sleep((step_ms + TOKEN_MS * len(tokens)) / 1e3)
        return prefill(self, table, tokens, start, **more)

    ModelRunner.decode = decode_slowly  # type: ignore[method-assign]
    ModelRunner.prefill = prefill_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    from ownerserve.cli.main import main

    pace()
    assume_prices(PRICES)
    main()
