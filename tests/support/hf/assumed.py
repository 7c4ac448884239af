"""Prices that nobody measures: what is assumed of an unmeasured engine stays.

    python -m tests.support.hf.assumed worker ...      `ownerserve worker ...`, so priced
    python -m tests.support.hf.assumed --dear worker ...   the same, and computing is dear: what can
                                                           be had from elsewhere is waited for

    python -m tests.support.hf.assumed --layers worker ... the same as the first, and each layer of
                                                           a prompt computed for a peer is told

By its prices a worker keeps a session's state or does not, loads or computes. What busy cores
measure differs tenfold from one minute to the next, and the cheapest way with it: a test that says
which way is gone says at what prices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from ownerserve.node.runtime import node_runtime
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.node.transfers import turn_lends
from ownerserve.plan.cost.events import Observation
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients


def pass_over(_calibration: Calibration, _seen: Iterable[Observation]) -> None:
    """What a calibration learns of measurements here: nothing."""


def assume_prices(unmeasured: Defaults = node_runtime.UNMEASURED) -> None:
    """Have each worker of this process keep to the prices of an unmeasured engine."""
    Calibration.observe = pass_over  # type: ignore[method-assign]
    Calibration.__init__.__defaults__ = (unmeasured,)


DEAR = msgspec.structs.replace(node_runtime.UNMEASURED, prefill=Coefficients(5.0, 100.0, 1e-6))
"""0.1 s a token: no machine is so busy that reading from a peer takes longer."""


if __name__ == "__main__":
    from ownerserve.cli.main import main

    if "--layers" in sys.argv:
        sys.argv.remove("--layers")
        turn_lends.PIECE_BYTES = 1
    if "--dear" in sys.argv:
        sys.argv.remove("--dear")
        assume_prices(DEAR)
    else:
        assume_prices()
    main()
