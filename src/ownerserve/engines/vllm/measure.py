"""What prompts and loads cost here, from when things happened. Feeds the node's cost model.

A prompt is measured whole, and only when nothing ran beside any of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec

from ownerserve.engines.vllm.orders import Brought
from ownerserve.kv.ids import TurnId
from ownerserve.node.calibration import Calibration
from ownerserve.plan.cost.events import Loaded, Prefilled
from ownerserve.plan.inputs import Tier

Later: TypeAlias = Callable[[Callable[[], None]], None]


class Prompt(msgspec.Struct, eq=False):
    """One that is being computed from `start` on; `tokens` long."""

    start: int
    tokens: int
    began_s: float
    end: int = 0
    is_alone: bool = True


class Measuring:
    """`calibration` None: prices are given, and nothing is measured."""

    def __init__(
        self, calibration: Calibration | None, later: Later, *, least_tokens: int = 1
    ) -> None:
        """Prompts of which fewer than `least_tokens` are computed decide nothing: not measured.

        `later` does something on another thread: what was learnt is written there.
        """
        self._calibration = calibration
        self._later = later
        self._least_tokens = least_tokens
        self._prompts: dict[TurnId, Prompt] = {}

    def computing(
        self, turn_id: TurnId, start: int, end: int, *, prompt: int, others: int, now: float
    ) -> None:
        """A step computes [start, end) of a turn, beside `others`."""
        if prompt - start >= self._least_tokens and turn_id not in self._prompts:
            self._prompts[turn_id] = Prompt(start, prompt, now)
        running = self._prompts.get(turn_id)
        if running is not None:
            running.end = end
            running.is_alone = running.is_alone and not others

    def stepped(self, now: float) -> None:
        """A step is done."""
        done = [turn_id for turn_id, at in self._prompts.items() if at.end >= at.tokens]
        for turn_id in done:
            at = self._prompts.pop(turn_id)
            if at.is_alone and self._calibration is not None:
                took_ms = (now - at.began_s) * 1e3
                self._calibration.observe((Prefilled(at.tokens - at.start, at.start, took_ms),))
        calibration = self._calibration
        if calibration is not None and (data := calibration.due(now)) is not None:
            self._later(partial(calibration.write, data))

    def loaded(self, brought: Brought) -> None:
        """A load is done. The planner is told of one store, so this is one tier's time."""
        if self._calibration is not None:
            self._calibration.observe((Loaded(Tier.DISK, brought.bytes, brought.ms),))

    def forget(self, turn_id: TurnId) -> None:
        """The turn was given up, or lost its blocks."""
        self._prompts.pop(turn_id, None)

    def close(self) -> None:
        """Keep what was learnt."""
        if self._calibration is not None:
            self._calibration.save()
