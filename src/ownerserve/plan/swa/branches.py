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
NEAREST_TOKENS, as long as it weighs at most CLOSE_SHARE of it. Of dearer points there are few: at
CHUNK_TOKENS and then GROWTH times as deep each time, from where one weighs no more than all range
state before it.

    even     |----^----^----^----^----^----^----^----^----^
    growing  |----^--^---^-----^-------^----------^

Where there is no lead a point LEAD_TOKENS before the prompt's end stands in for it, if it weighs at
most SHARE of the range state of NEAREST_TOKENS, and as many tokens are computed before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import ClassVar

import msgspec

from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnSpan

LEAD_TOKENS = 256
CHUNK_TOKENS = 8192
"""The longest prefill step of most engines."""
NEAREST_TOKENS = 2048
SHARE = 0.5
CLOSE_SHARE = 0.125
GROWTH = 1.5
"""Chosen on recorded sessions (docs/evidence/point-policy.md)."""
TURN_TOKENS = 4096
STORE_SHARES = (0.2, 0.8)
"""What a turn adds to a session, about; least and most of a store that points get."""


class PointCost(msgspec.Struct, frozen=True):
    """A `PointCost` is what a model's point weighs, in bytes, beside its range state a token.
    `has_lead`: rows of windows are kept before a prompt's end."""

    point_bytes: int
    range_bytes_per_token: float
    has_lead: bool

    def spacing_tokens(self, block_tokens: int) -> int:
        """Return how many tokens apart chunk ends are kept, a multiple of the block; 0: they are
        not evenly apart (`growing`)."""
        spacing = -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if self.point_bytes > SHARE * self.range_bytes_per_token * spacing:
            return 0
        closer = -(-NEAREST_TOKENS // block_tokens) * block_tokens
        while closer < spacing:
            if self.point_bytes <= CLOSE_SHARE * self.range_bytes_per_token * closer:
                return closer
            closer *= 2
        return spacing

    def growing(self, block_tokens: int) -> Iterator[int]:
        """Yield the chunk ends of a model whose points are dear, ascending, multiples of the block;
        there is no last one where there is a first."""
        at = float(CHUNK_TOKENS)
        while self.range_bytes_per_token:
            end = -(-int(at) // block_tokens) * block_tokens
            if self.point_bytes <= self.range_bytes_per_token * end:
                yield end
            at *= GROWTH

    def first_chunk_end(self, block_tokens: int) -> int:
        """Return the first chunk end of a long prompt; 0: it has none."""
        even = self.spacing_tokens(block_tokens)
        return even or next(self.growing(block_tokens), 0)

    @property
    def store_share(self) -> float:
        """`store_share` is the share of a store's bytes that points get: as much as one weighs
        beside the range state of TURN_TOKENS, within STORE_SHARES."""
        least, most = STORE_SHARES
        of_a_turn = self.point_bytes + self.range_bytes_per_token * TURN_TOKENS
        return min(most, max(least, self.point_bytes / max(1.0, of_a_turn)))

    @property
    def stands_in_for_lead(self) -> bool:
        """`stands_in_for_lead` tells whether a prompt gets a point before its end, since it has no
        lead and the point is cheap."""
        near = SHARE * self.range_bytes_per_token * NEAREST_TOKENS
        return not self.has_lead and self.point_bytes <= near


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
        """Return the boundaries inside the prompt that a point's weight allows, and the one that
        stands in for a lead."""
        block, cost = turn.block_tokens, self._cost
        if spacing := cost.spacing_tokens(block):
            first = turn.start // spacing * spacing + spacing
            kept = set(range(first, turn.prompt_end, spacing))
        else:
            ends = takewhile(lambda at: at < turn.prompt_end, cost.growing(block))
            kept = {at for at in ends if at > turn.start}
        before = (turn.prompt_end - LEAD_TOKENS) // block * block
        if cost.stands_in_for_lead and before - turn.start >= LEAD_TOKENS:
            kept.add(before)
        return tuple(sorted(kept))
