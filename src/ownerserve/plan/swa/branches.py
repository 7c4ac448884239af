"""The branches policy keeps point state where later prompts part from stored ones. Pure.

    turn     |-- shared head --|------------ prompt ------------------|-- output --|
                               ^junction     ^chunk end      [lead ^ ^]            ^
             known from the first that parts there            turn ends: TurnEnd's

A turn end has a lead: the window rows of its last LEAD_TOKENS tokens are kept too, so that every
boundary in them restores, as agents drop or change the last message of a prompt. Recurrent state
has no rows, and no lead. A junction is where a prompt parts from what is stored: the first that
does so computes what follows the last point before it and leaves a point there, the second goes on
at it.

Chunk ends are kept where a point is cheap beside the range state that it makes usable: every
CHUNK_TOKENS if a point weighs at most SHARE of the range state between two, and closer, down to
NEAREST_TOKENS, as long as it weighs at most CLOSE_SHARE of it; else there are none.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnSpan

LEAD_TOKENS = 256
CHUNK_TOKENS = 8192
"""The longest prefill step of most engines."""
NEAREST_TOKENS = 2048
SHARE = 0.5
CLOSE_SHARE = 0.125
"""Chosen on recorded sessions (docs/evidence/point-policy.md)."""


class PointCost(msgspec.Struct, frozen=True):
    """A `PointCost` is what a model's point weighs, in bytes, beside its range state a token."""

    point_bytes: int
    range_bytes_per_token: float

    def spacing_tokens(self, block_tokens: int) -> int:
        """Return how many tokens apart chunk ends are kept, a multiple of the block; 0: none
        are."""
        spacing = -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if self.point_bytes > SHARE * self.range_bytes_per_token * spacing:
            return 0
        closer = -(-NEAREST_TOKENS // block_tokens) * block_tokens
        while closer < spacing:
            if self.point_bytes <= CLOSE_SHARE * self.range_bytes_per_token * closer:
                return closer
            closer *= 2
        return spacing


class Branches(CheckpointPolicy):
    """The branches policy checkpoints turn ends with their lead, junctions, and chunk ends where
    they are cheap (see the module)."""

    name: ClassVar[str] = "branches"
    lead_tokens: ClassVar[int] = LEAD_TOKENS

    def __init__(self, cost: PointCost) -> None:
        self._cost = cost

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        block = turn.block_tokens
        junctions = {at // block * block for at in turn.junctions}
        kept = {at for at in junctions if turn.start < at <= turn.end}
        return tuple(sorted(kept.union(turn.turn_ends())))

    def chunk_ends(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the multiples of the spacing that a point's weight allows, in the prompt."""
        spacing = self._cost.spacing_tokens(turn.block_tokens)
        if not spacing:
            return ()
        return tuple(range(turn.start // spacing * spacing + spacing, turn.prompt_end, spacing))
