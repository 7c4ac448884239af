"""The fleets' processes check their state machines after each event: what does not hold is said on
standard error with FAILED in front, and raised."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.kv.errors import InvariantViolated
from ownerserve.node.state import NodeState
from ownerserve.router.state import RouterState
from tests.support.kills.forked import FAILED


def check_after(kind: type, method: str) -> None:
    """Have each call of `method` end with the instance's own `check`."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def checked(self: Any, *given: Any, **named: Any) -> Any:
        outcome = original(self, *given, **named)
        try:
            self.check()
        except InvariantViolated as error:
            print(f"{FAILED} after {method}{given}: {error}", file=sys.stderr, flush=True)
            raise
        return outcome

    setattr(kind, method, checked)


def watch() -> None:
    """Have routers, nodes and schedulers of this process check themselves."""
    check_after(RouterState, "handle")
    check_after(NodeState, "handle")
    check_after(Scheduler, "step_done")
