"""Replays are what running requests compute again, and whether this engine can do so at all.

    0 ------------ kept by full attention ------------ hit          prompt's end
                            start |== computed again ==||== computed, written ==|
                                        exact |== every window's rows are right ==|

One object of an engine core, shared by its scheduler, its window managers and its connector. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ownerserve.plan.restore import Planner


class ReplayRange(msgspec.Struct, frozen=True):
    """A `ReplayRange` is what a request computes again: tokens [start, hit). Of `depth` tokens from
    `start` on some window layer's input may be wrong."""

    start: int
    hit: int
    depth: int

    def exact(self, window: int) -> int:
        """Return the first token whose row a layer with so long a window has right."""
        return min(self.hit, max(0, self.start + self.depth - window + 1))


class ResumeAt(msgspec.Struct, frozen=True):
    """A `ResumeAt` says how a request goes on: full attention's first `local` tokens come from
    vLLM's cache and the rest of `hit` from the store; from `start` on all is computed."""

    start: int
    local: int
    hit: int


class ReplayLengths(msgspec.Struct, frozen=True):
    """`ReplayLengths` are a model's: `depth` tokens make its windows right, `reach` are computed
    again so that the last whole blocks of every window are. 0: it has no replay."""

    depth: int = 0
    reach: int = 0


class Replays:
    """`Replays` owns the replays of one engine core. They begin once a scheduler of ours takes part
    and every worker has said that it can keep KV from being written."""

    def __init__(self, lengths: ReplayLengths, planner: Planner | None, *, workers: int) -> None:
        """Make it. `planner` offers replays; None: this engine has none."""
        self.lengths = lengths
        self.planner = planner
        self._workers = workers
        self._said: list[bool] = []
        self._has_scheduler = False
        self._ranges: dict[str, ReplayRange] = {}

    def take_part(self) -> None:
        """Note that the engine's scheduler is one of ours."""
        self._has_scheduler = True

    def heard(self, can_pad: Iterable[bool]) -> None:
        """Note what workers said of themselves, one word each."""
        self._said += can_pad

    def switch_off(self) -> None:
        """Begin no replay any more."""
        self.planner = None

    @property
    def is_unknown(self) -> bool:
        """`is_unknown` tells whether workers have not all said yet what they can do."""
        possible = self.planner is not None and self._has_scheduler
        return possible and len(self._said) < self._workers

    @property
    def is_on(self) -> bool:
        """`is_on` tells whether requests may be replayed."""
        possible = self.planner is not None and self._has_scheduler
        return possible and len(self._said) >= self._workers and all(self._said)

    def begin(self, request_id: str, resume: ResumeAt) -> None:
        """Note that the request will go on so; a replay is what it computes below the hit."""
        self._ranges.pop(request_id, None)
        if resume.start < resume.hit:
            self._ranges[request_id] = ReplayRange(resume.start, resume.hit, self.lengths.depth)

    def of(self, request_id: str) -> ReplayRange | None:
        """Return what the request replays; None: nothing."""
        return self._ranges.get(request_id)

    def end(self, request_id: str) -> None:
        """Forget the request's replay, since it lost its blocks; no error where there is none."""
        self._ranges.pop(request_id, None)

    @property
    def running(self) -> Mapping[str, ReplayRange]:
        """`running` are the replays of requests that have blocks, or are about to."""
        return self._ranges
