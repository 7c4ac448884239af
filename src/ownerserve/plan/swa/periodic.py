"""Periodic writes one checkpoint every p tokens; the rest is recomputed (V4 report §3.5.2)."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.swa.base import CheckpointPolicy, TurnSpan


class Periodic(CheckpointPolicy):
    """The periodic policy checkpoints every `period_tokens` tokens, rounded up to a boundary."""

    name: ClassVar[str] = "periodic"

    def __init__(self, period_tokens: int) -> None:
        if period_tokens < 1:
            raise InvalidInput("period_tokens", f"{period_tokens}", "use 1 or more")
        self.period_tokens = period_tokens

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        blocks = -(-self.period_tokens // turn.block_tokens)
        return turn.grid(blocks * turn.block_tokens)
