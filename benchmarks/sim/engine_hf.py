"""The reference engine, a step at a time: its scheduler, cache and runner as they serve.

Owns the wiring and a greedy choice of tokens; everything that decides is the engine's. `now` is
the number of the step. Relief of pressure is the loop's own rule (restoring.WithoutNode.poll).
"""

from __future__ import annotations

import torch
from lockstep import Asked, Case, Replayed, replay

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.policies.lru import Lru
from ownerserve.engines.hf.model.checkpoint import load_checkpoint
from ownerserve.engines.hf.model.runner import DecodeRow, ModelRunner
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import QueuedPrompt, RequestArrival, SchedulerLimits
from ownerserve.kv.ids import TurnId
from ownerserve.node.vocabulary.chains import prefix_of


class HfEngine:
    """See the module. `case.blocks` slots of each pool; a prompt's whole blocks are one chunk."""

    def __init__(self, model: str, case: Case) -> None:
        torch.set_num_threads(1)
        self._runner = ModelRunner(load_checkpoint(model).model)
        layout = self._runner.layout
        if layout.block_tokens != case.trace.block_tokens:
            raise ValueError(f"{model} has blocks of {layout.block_tokens} tokens")
        slots = {c.name: case.blocks for c in layout.components}
        self._runner.allocate(slots, case.running)
        self.cache = HeteroCache(layout, slots, case.running, Lru())
        limits = SchedulerLimits(
            chunk_tokens=case.step_tokens,
            prefill_tokens_a_step=case.step_tokens,
            max_running=case.running,
            max_waiting=1000,
            sequence_tokens=case.blocks * layout.block_tokens,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.result = Replayed({}, 0)
        self._left: dict[TurnId, int] = {}
        self._now = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, asked: Asked) -> None:
        turn_id = TurnId(asked.name)
        arrival = RequestArrival(
            request_id=asked.name,
            turn_ids=(turn_id,),
            prompt=prefix_of(asked.tokens, self.cache.layout.block_tokens),
            max_new_tokens=asked.answer_tokens,
            session_id=asked.session,
        )
        taken = self.scheduler.arrive(arrival)
        assert isinstance(taken, QueuedPrompt), f"{asked.name}: {taken.message}"
        self._left[turn_id] = asked.answer_tokens

    def step(self) -> list[str]:
        self._now += 1.0
        pressure = self.cache.pressure
        if pressure.is_due:
            pressure.relieve(self._now)
        plan = self.scheduler.plan(self._now)
        self.result.preemptions += len(plan.preempted)
        if plan.failed:
            raise RuntimeError(f"no room for {plan.failed}")
        for admission in plan.admitted:
            self.result.cached.setdefault(admission.request_id, admission.restored)
        self._runner.apply(plan.effects)
        tokens: dict[TurnId, int] = {}
        if plan.rows:
            rows = [DecodeRow(row.table, row.token, row.position) for row in plan.rows]
            for row, logits in zip(plan.rows, self._runner.decode(rows), strict=True):
                tokens[row.turn_id] = int(logits.argmax())
        for chunk in plan.chunks:
            logits = self._runner.prefill(
                chunk.table, chunk.tokens, chunk.start, write_floor=chunk.write_floor
            )
            for turn_id in chunk.sample_for:
                tokens[turn_id] = int(logits[-1].argmax())
        self.result.prefill_only_steps += not tokens
        for turn_id in tokens:
            self._left[turn_id] -= 1
        ended = [turn_id for turn_id in tokens if not self._left[turn_id]]
        self._runner.apply(self.scheduler.step_done(tokens, ended, now=self._now))
        for turn_id in ended:
            del self._left[turn_id]
        return [str(turn_id) for turn_id in ended]


def replay_hf(model: str, case: Case) -> Replayed:
    """The case through the reference engine."""
    engine = HfEngine(model, case)
    with torch.inference_mode():
        engine.result.steps = replay(case, engine)
    engine.scheduler.check()
    engine.result.evicted_blocks = engine.cache.counters.evicted_tokens // case.trace.block_tokens
    return engine.result
