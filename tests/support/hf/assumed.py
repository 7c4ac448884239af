"""Prices that nobody measures: what is assumed of an unmeasured engine stays.

    python -m tests.support.hf.assumed worker ...      `ownerserve worker ...`, so priced
    python -m tests.support.hf.assumed --dear worker ...   the same, and computing is dear: what can
                                                           be had from elsewhere is waited for
    --slow-steps                                           each step in which answers are written
                                                           takes a hundredth of a second more
    --checked                                              node and scheduler check themselves
                                                           after each event
    --layers                                               each layer of a prompt that is computed
                                                           for a peer is told
    --state-after                                          of a turn that moves here nothing is
                                                           brought before it is stopped

By its prices a worker keeps a session's state or does not, loads or computes. What busy cores
measure differs tenfold from one minute to the next, and the cheapest way with it: a test that says
which way is gone says at what prices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ownerserve.node.runtime import node_runtime
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.node.transfers import turn_lends, turn_states
from ownerserve.plan.cost.events import Observation
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients

STEP_S = 0.01


def pass_over(_calibration: Calibration, _seen: Iterable[Observation]) -> None:
    """What a calibration learns of measurements here: nothing."""


def assume_prices(unmeasured: Defaults = node_runtime.UNMEASURED) -> None:
    """Have each worker of this process keep to the prices of an unmeasured engine."""
    Calibration.observe = pass_over  # type: ignore[method-assign]
    Calibration.__init__.__defaults__ = (unmeasured,)


DEAR = msgspec.structs.replace(node_runtime.UNMEASURED, prefill=Coefficients(5.0, 100.0, 1e-6))
"""0.1 s a token: no machine is so busy that reading from a peer takes longer."""


def slow_steps(put: Callable[[type, str, Any], object] = setattr) -> None:
    """Have each step of this process in which answers are written take STEP_S more, so that one
    is amid its answer when something happens, on any machine."""
    from ownerserve.engines.hf.model.runner import ModelRunner

    decode = ModelRunner.decode

    def slowly(self: ModelRunner, rows: Sequence[Any]) -> Any:
        time.sleep(STEP_S)
        return decode(self, rows)

    put(ModelRunner, "decode", slowly)


if __name__ == "__main__":
    from ownerserve.cli.main import main

    if "--checked" in sys.argv:
        from tests.support.kills import checked

        sys.argv.remove("--checked")
        checked.watch()
    if "--layers" in sys.argv:
        sys.argv.remove("--layers")
        turn_lends.PIECE_BYTES = 1
    if "--state-after" in sys.argv:
        sys.argv.remove("--state-after")
        turn_states.ROUNDS = 0
    if "--slow-steps" in sys.argv:
        sys.argv.remove("--slow-steps")
        slow_steps()
    if "--dear" in sys.argv:
        sys.argv.remove("--dear")
        assume_prices(DEAR)
    else:
        assume_prices()
    main()
