"""Zero writes no point state; windows are rebuilt by exact replay (V4 report §3.5.2).

For a model with recurrent state, which no replay rebuilds, this means: prefill from the start.
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.plan.swa.base import CheckpointPolicy, TurnSpan


class Zero(CheckpointPolicy):
    """The zero policy has no writes and the most recompute: sum over window layers of (n - 1)
    tokens a restore.
    """

    name: ClassVar[str] = "zero"

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        return ()
