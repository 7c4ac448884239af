"""This module measures what prompts and loads cost here, from when things happened. Feeds the
node's cost model.

A prompt is measured whole, and only when nothing ran beside any of its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

import msgspec

from ownerserve.engines.vllm.worker_commands import LoadResult
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.plan.cost.events import Loaded, Prefilled, Stepped
from ownerserve.plan.cost.model import CostModel

IN_FLIGHT = 4
"""Steps whose answer is awaited, at most; of more, an answer can't be told apart."""
TELL_S = 1.0
TAIL_EVERY_S = 0.1
"""How often a short prompt is measured, at most: to learn takes a part of a millisecond, which
belongs to the request."""

Later: TypeAlias = Callable[[Callable[[], None]], None]


class RunningPrompt(msgspec.Struct, eq=False):
    """A `RunningPrompt` is a prompt of `tokens` that is being computed from token `start` on."""

    start: int
    tokens: int
    began_s: float
    end: int = 0
    is_alone: bool = True


class ScheduledStep(msgspec.Struct, frozen=True):
    """A `ScheduledStep` is a step that was scheduled. `batch` counts the sequences that decode in
    it; 0 when any does more."""

    batch: int
    at_s: float


def _nobody(computed_s: float) -> None:
    """Nobody wants to know."""


class ConnectorObserver:
    """A `ConnectorObserver` measures every step, prompt and load of one engine, for the node's cost
    model."""

    def __init__(
        self,
        calibration: Calibration,
        later: Later,
        *,
        tell: Callable[[CostModel], None],
        tail_tokens: int = 1,
        computed: Callable[[float], None] = _nobody,
    ) -> None:
        """Make it and tell what is known. A prompt of which fewer than `tail_tokens` are computed
        is a tail: most come behind what was restored or resident, and say what a pass costs that
        computes next to nothing. One is measured in TAIL_EVERY_S.

        `later` does something on another thread: what was learnt is written there. `tell` hears
        of what was learnt, at most once in TELL_S; `computed` after each step of for how long, in
        seconds, all of them have computed.
        """
        self._calibration = calibration
        self._later = later
        self._tell = tell
        self._tail_tokens = tail_tokens
        self._tail_s = 0.0
        self._prompts: dict[TurnId, RunningPrompt] = {}
        self._steps: deque[ScheduledStep] = deque(maxlen=IN_FLIGHT)
        self._stepped_s = self._told_s = 0.0
        self._computed, self._computed_s = computed, 0.0
        tell(calibration.model)

    def scheduled(self, tokens: Mapping[str, int], now: float) -> None:
        """Note that a step is about to run, with so many tokens of each request."""
        if tokens:
            decodes_only = max(tokens.values()) == 1
            self._steps.append(ScheduledStep(len(tokens) if decodes_only else 0, now))

    def computing(
        self, turn_id: TurnId, start: int, end: int, *, prompt: int, others: int, now: float
    ) -> None:
        """Note that a step computes [start, end) of a turn, beside `others` other requests."""
        if turn_id not in self._prompts and self._is_measured(prompt - start, now):
            self._prompts[turn_id] = RunningPrompt(start, prompt, now)
        running = self._prompts.get(turn_id)
        if running is not None:
            running.end = end
            running.is_alone = running.is_alone and not others

    def _is_measured(self, new: int, now: float) -> bool:
        if new >= self._tail_tokens:
            return True
        is_due = now - self._tail_s >= TAIL_EVERY_S
        if is_due:
            self._tail_s = now
        return is_due

    def reported(self, now: float) -> None:
        """Learn from a step whose answer is here: it took from when it was scheduled, or from the
        answer before, if steps overlap."""
        if self._steps:
            step = self._steps.popleft()
            took_s = now - max(step.at_s, self._stepped_s)
            self._computed_s += took_s
            self._computed(self._computed_s)
            if step.batch:
                self._calibration.observe((Stepped(step.batch, took_s * 1e3),))
        self._stepped_s = now
        self.stepped(now)

    def stepped(self, now: float) -> None:
        """Learn from the prompts that are done, and tell and write what is due."""
        done = [turn_id for turn_id, at in self._prompts.items() if at.end >= at.tokens]
        for turn_id in done:
            at = self._prompts.pop(turn_id)
            if at.is_alone:
                took_ms = (now - at.began_s) * 1e3
                self._calibration.observe((Prefilled(at.tokens - at.start, at.start, took_ms),))
        if now - self._told_s >= TELL_S:
            self._told_s = now
            self._tell(self._calibration.model)
        if (data := self._calibration.due(now)) is not None:
            self._later(partial(self._calibration.write, data))

    def loaded(self, result: LoadResult) -> None:
        """Learn from a load that is done. The planner is told of one store, so this is one tier's
        time."""
        self._calibration.observe((Loaded(Tier.DISK, result.bytes, result.ms),))

    def brought(self, timings: Iterable[Loaded]) -> None:
        """Learn from what peers had at hand and was brought whole."""
        self._calibration.observe(timings)

    def forget(self, turn_id: TurnId) -> None:
        """Forget the turn, which is over or lost its blocks. What it taught is told: no step may
        follow."""
        self._prompts.pop(turn_id, None)
        self._tell(self._calibration.model)

    def close(self) -> None:
        """Write what was learnt, as far as the drive answers in time."""
        self._calibration.save()
