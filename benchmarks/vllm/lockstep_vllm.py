"""Inside a vLLM worker: a case of benchmarks/sim/lockstep.py, a step of the engine at a time.

Importing this gives tests/support/vllm/hooks.py the question `replay_case`. Counts what vLLM
does by wrapping three of its methods; changes nothing of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from vllm import SamplingParams

from tests.support.vllm import hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

from lockstep import Asked, Case, Replayed, replay


class VllmEngine:
    """The engine of a worker, stepped. Counted are steps that compute: behind the last request that
    ends vLLM makes one more, with nothing in it, to tell its workers."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker.engine
        self._scheduler = worker.scheduler
        self.result = Replayed({}, 0)
        self.computed = False
        self._count_evictions()
        self._count_preemptions()
        self._count_steps()

    def _count_evictions(self) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        evict = pool._maybe_evict_cached_block

        def counted(block: Any) -> bool:
            was_evicted = bool(evict(block))
            self.result.evicted_blocks += was_evicted
            return was_evicted

        pool._maybe_evict_cached_block = counted

    def _count_preemptions(self) -> None:
        scheduler = self._scheduler
        preempt = scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self.result.preemptions += 1
            return preempt(*arguments, **options)

        scheduler._preempt_request = counted

    def _count_steps(self) -> None:
        scheduler = self._scheduler
        schedule = scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self.computed = output.total_num_scheduled_tokens > 0
            self.result.steps += self.computed
            return output

        scheduler.schedule = counted

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.has_requests())

    def submit(self, asked: Asked) -> None:
        parameters = SamplingParams(
            temperature=0.0, max_tokens=asked.answer_tokens, ignore_eos=True, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": asked.tokens}
        self._engine.add_request(asked.name, prompt, parameters)

    def step(self) -> list[str]:
        self.computed = False
        outputs = self._engine.step()
        self.result.prefill_only_steps += self.computed and not outputs
        ended = [output for output in outputs if output.finished]
        for output in ended:
            self.result.cached[output.request_id] = output.num_cached_tokens or 0
        return [output.request_id for output in ended]


def replay_case(worker: Any, *, path: str) -> dict[str, Any]:
    """The case that lies at `path`, through the worker's engine."""
    case = msgspec.msgpack.decode(Path(path).read_bytes(), type=Case)
    engine = VllmEngine(worker)
    replay(case, engine)
    found: dict[str, Any] = msgspec.to_builtins(engine.result)
    return found


hooks.replay_case = replay_case  # type: ignore[attr-defined]
