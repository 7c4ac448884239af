"""This module defines what a checkpoint policy is asked and what it answers.

A turn computes tokens [start, end); the policy names the boundaries in (start, end] whose point
state is to be written to the store. It owns nothing but what it was told by `observe`.

    ├─ known before ─┼────── prompt ──────┼── output ──┤
                     start            prompt_end      end
                                 ^    ^             ^     turn-end boundaries:
              floor((N-1)/B)B ───┘    floor(N/B)B   floor(end/B)B
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ownerserve.kv.errors import InvalidInput


class TurnSpan(msgspec.Struct, frozen=True):
    """A turn's span is the tokens of one turn: [start, prompt_end) prefilled, [prompt_end, end)
    generated.
    """

    start: int
    prompt_end: int
    end: int
    block_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.prompt_end <= self.end or self.block_tokens < 1:
            raise InvalidInput(
                "turn", f"[{self.start}, {self.prompt_end}, {self.end})", "give ascending positions"
            )

    def turn_ends(self) -> tuple[int, ...]:
        """Return the boundaries a next turn resumes from: see the picture (contract of
        design.md).
        """
        b = self.block_tokens
        wanted = {(self.prompt_end - 1) // b * b, self.prompt_end // b * b, self.end // b * b}
        return tuple(sorted(at for at in wanted if self.start < at <= self.end))

    def grid(self, period: int) -> tuple[int, ...]:
        """Return the multiples of `period` in it."""
        first = self.start // period * period + period
        return tuple(range(first, self.end + 1, period))


class StateSize(msgspec.Struct, frozen=True):
    """A state size is point state in bytes: all of it at one boundary, and what of it are window
    rows a token.

    Neighbouring checkpoints closer than a window share rows, so a full policy writes rows once a
    token and only the rest (`other_bytes`: overlap rows, recurrent state) once a boundary.
    """

    point_bytes: int
    row_bytes_per_token: float = 0.0
    other_bytes: int = 0


class Produced(msgspec.Struct, frozen=True, tag=True):
    """A turn was computed and its checkpoints written."""

    turn: TurnSpan


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A session went on from the turn end at `position`, and the device no longer had its state."""

    position: int


class Branched(msgspec.Struct, frozen=True, tag=True):
    """A turn shares only [0, position) with one before, and the device had no state there."""

    position: int


Reuse = Produced | Resumed | Branched


class CheckpointPolicy:
    """CheckpointPolicy is the base of all policies: only `checkpoints` must be given."""

    name: ClassVar[str]

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        raise NotImplementedError

    def written_bytes(self, turn: TurnSpan, size: StateSize) -> int:
        """Return the bytes of point state that this turn writes."""
        return len(self.checkpoints(turn)) * size.point_bytes

    def observe(self, event: Reuse) -> None:
        """Learn from what happened; most policies don't."""
