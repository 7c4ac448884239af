"""TurnEnd checkpoints where a next turn will resume, and nowhere else.

What DeepSeek-V4 did in production (V4.1 report §3.2).
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.plan.swa.base import CheckpointPolicy, TurnSpan


class TurnEnd(CheckpointPolicy):
    """The turn-end policy checkpoints the end of prompt (both boundaries that a resend or an
    extension hits) and the end of output.
    """

    name: ClassVar[str] = "turn-end"

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        return turn.turn_ends()
