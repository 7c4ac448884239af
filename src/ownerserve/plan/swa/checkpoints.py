"""Checkpoint policies say at which boundaries of a turn point state is kept: what they are asked,
what they answer, and the fixed ones, which learn nothing (adaptive.py has the one that does).

A turn computes tokens [start, end); a policy names the boundaries in (start, end] whose point
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
    generated. At `junctions` its prompt parts from what is stored.
    """

    start: int
    prompt_end: int
    end: int
    block_tokens: int
    junctions: tuple[int, ...] = ()

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
    """CheckpointPolicy is the base of all policies: only `checkpoints` must be given.

    `lead_tokens` is how far before a prompt's end every boundary is to be kept, 0: only those of
    `checkpoints` are.
    """

    name: ClassVar[str]
    lead_tokens: ClassVar[int] = 0

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        raise NotImplementedError

    def chunk_ends(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries of a prompt whose point state is written as well, ascending, as
        long as there is room for copies; an engine that has none there may take the next one."""
        return ()

    def written_bytes(self, turn: TurnSpan, size: StateSize) -> int:
        """Return the bytes of point state that this turn writes."""
        return len(self.checkpoints(turn)) * size.point_bytes

    def observe(self, event: Reuse) -> None:
        """Learn from what happened; most policies don't."""


class Full(CheckpointPolicy):
    """The full policy writes every window row, so that every boundary can be resumed (V4 report
    §3.5.2): the least recompute and the most writes, about 8x the compressed KV on DeepSeek-V4.
    """

    name: ClassVar[str] = "full"

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        return turn.grid(turn.block_tokens)

    def written_bytes(self, turn: TurnSpan, size: StateSize) -> int:
        """Return the bytes of point state that this turn writes: each window row once."""
        rows = round((turn.end - turn.start) * size.row_bytes_per_token)
        return rows + len(self.checkpoints(turn)) * size.other_bytes


class Periodic(CheckpointPolicy):
    """The periodic policy checkpoints every `period_tokens` tokens, rounded up to a boundary; the
    rest is recomputed (V4 report §3.5.2).
    """

    name: ClassVar[str] = "periodic"

    def __init__(self, period_tokens: int) -> None:
        if period_tokens < 1:
            raise InvalidInput("period_tokens", f"{period_tokens}", "use 1 or more")
        self.period_tokens = period_tokens

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        blocks = -(-self.period_tokens // turn.block_tokens)
        return turn.grid(blocks * turn.block_tokens)


class TurnEnd(CheckpointPolicy):
    """The turn-end policy checkpoints where a next turn will resume, and nowhere else: the end of
    prompt (both boundaries that a resend or an extension hits) and the end of output. DeepSeek-V4
    did so in production (V4.1 report §3.2).
    """

    name: ClassVar[str] = "turn-end"

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        return turn.turn_ends()


class Zero(CheckpointPolicy):
    """The zero policy writes no point state; windows are rebuilt by exact replay (V4 report
    §3.5.2): no writes, and a recompute of sum over window layers of (n - 1) tokens a restore.

    With recurrent state, which no replay rebuilds, this means: prefill from the start.
    """

    name: ClassVar[str] = "zero"

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        return ()
