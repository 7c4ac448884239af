"""Prices that nobody measures: what is assumed of an unmeasured engine stays.

    python -m tests.support.hf.assumed worker ...      `ownerserve worker ...`, so priced

By its prices a worker keeps a session's state or does not, loads or computes. What busy cores
measure differs tenfold from one minute to the next, and the cheapest way with it: a test that says
which way is gone says at what prices.
"""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.plan.cost.events import Observation


def pass_over(_calibration: Calibration, _seen: Iterable[Observation]) -> None:
    """What a calibration learns of measurements here: nothing."""


def assume_prices() -> None:
    """Have each worker of this process keep to the prices of an unmeasured engine."""
    Calibration.observe = pass_over  # type: ignore[method-assign]


if __name__ == "__main__":
    from ownerserve.cli.main import main

    assume_prices()
    main()
