"""What prompts and decode steps cost on this engine, from the steps themselves.

Owns the prompts that are being measured; the calibration owns what was learnt. Lives on the engine
thread. A prompt is measured whole, and only when nothing ran beside any of its chunks; a decode
step when no prompt was computed in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ownerserve.engines.hf.scheduling.step import Admission, Chunk, StepPlan
from ownerserve.kv.ids import TurnId
from ownerserve.node.runtime.calibration import Calibration
from ownerserve.plan.cost.events import Prefilled, Replayed, Stepped
from ownerserve.plan.cost.model import CostModel


class _Prompt(msgspec.Struct, eq=False):
    """One that is being computed. Its first `restored` tokens were not."""

    restored: int
    computed: int
    is_measured: bool = True
    prefill_ms: float = 0.0
    replay_ms: float = 0.0


class Measuring:
    """Told of every admission, step and end."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._prompts: dict[TurnId, _Prompt] = {}

    @property
    def costs(self) -> CostModel:
        """What was learnt so far."""
        return self._calibration.model

    def admitted(self, admission: Admission) -> None:
        """A prompt begins. One that comes back from a preemption is no measurement."""
        restored = admission.restored
        if not admission.again:
            self._prompts[admission.turn_id] = _Prompt(restored, restored)

    def stepped(self, plan: StepPlan, took_ms: float) -> None:
        """A step was planned, computed and told in `took_ms`."""
        if plan.rows and not plan.chunks:
            self._calibration.observe((Stepped(len(plan.rows), took_ms),))
        is_alone = len(plan.chunks) == 1 and not plan.rows
        for chunk in plan.chunks:
            prompt = self._prompts.get(chunk.turn_id)
            if prompt is None:
                continue
            goes_on = chunk.start == prompt.computed
            prompt.is_measured = prompt.is_measured and is_alone and goes_on
            _add(prompt, chunk, took_ms)
            if chunk.sample_for:
                self._done(self._prompts.pop(chunk.turn_id), chunk)

    def forget(self, turn_ids: Iterable[TurnId]) -> None:
        """These turns are over, or were given up."""
        for turn_id in turn_ids:
            self._prompts.pop(turn_id, None)

    def _done(self, prompt: _Prompt, last: Chunk) -> None:
        """A prompt is computed. Only whole ones are measured: prices hold what many chunks cost."""
        if not prompt.is_measured:
            return
        floor, end = max(prompt.restored, last.write_floor), last.start + len(last.tokens)
        self._calibration.observe((Prefilled(end - floor, floor, prompt.prefill_ms),))
        if prompt.replay_ms:
            replayed = Replayed(floor - prompt.restored, prompt.restored, prompt.replay_ms)
            self._calibration.observe((replayed,))


def _add(prompt: _Prompt, chunk: Chunk, ms: float) -> None:
    """Share a chunk's time between what it replays and what it computes anew."""
    new = len(chunk.tokens)
    prompt.computed = chunk.start + new
    again = min(max(0, chunk.write_floor - chunk.start), new)
    prompt.replay_ms += ms * again / new
    prompt.prefill_ms += ms * (new - again) / new
