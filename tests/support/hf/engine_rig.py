"""An engine to ask, and the truth from the bare ModelRunner. Shared by the engine's tests.

Reference: the runner alone, one sequence, slots 0, 1, ... in order, no cache and no scheduler. It
is fed the engine's own tokens, so that one argmax flip does not hide the rest: every chosen
token's log-probability must agree, and a greedy one must be the best within the tolerance.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from ownerserve.cache.effects import ResetState
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Table
from ownerserve.engines.hf.build import WorkerOptions, build_node
from ownerserve.engines.hf.engine import loop
from ownerserve.engines.hf.engine.commands import AsyncEngine
from ownerserve.engines.hf.engine.loop import StepLoop
from ownerserve.engines.hf.metrics.prometheus import RestoreMetrics, WorkerMetrics
from ownerserve.engines.hf.metrics.status import WorkerIdentity
from ownerserve.engines.hf.model.checkpoint import LoadedCheckpoint, load_checkpoint
from ownerserve.engines.hf.model.runner import DecodeRow, ModelRunner
from ownerserve.engines.hf.model.text import ChatCodec
from ownerserve.engines.hf.node import restoring
from ownerserve.engines.hf.node.restoring import WithNode
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    Delta,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    Sampling,
    Stopping,
)
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import SchedulerLimits
from ownerserve.kv.descriptor import TailForm

TOLERANCE = 1e-4
GREEDY = Sampling(temperature=0.0, logprobs=1)


@functools.cache
def checkpoint(name: str) -> LoadedCheckpoint:
    torch.set_num_threads(1)
    return load_checkpoint(name)


class Later:
    """The engine thread's clock, which a test may put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_s = 0.0
        for module in (loop, restoring):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Rig:
    """An engine with pools of a chosen size, and what came out of it."""

    def __init__(
        self,
        name: str = "tiny-v4",
        *,
        blocks: int = 200,
        points: int | tuple[int, int] | None = None,
        max_running: int = 8,
        options: WorkerOptions | None = None,
        hca_tail: TailForm = TailForm.RAW_ROWS,
    ) -> None:
        """`options` are a node's: its store, its host cache, its settings. `points` None: as many
        as blocks; two: the least and the most, of which the others may give way to blocks."""
        loaded = checkpoint(name)
        self.runner = ModelRunner(loaded.model, hca_tail=hca_tail)
        layout = self.runner.layout
        slots = {c.name: blocks for c in layout.components}
        least, most = points if isinstance(points, tuple) else (None, points)
        if most is not None:
            slots |= dict.fromkeys(layout.point_names, most)
        self.runner.allocate(slots, max_running)
        self.cache = HeteroCache(layout, slots, max_running, least_points=least)
        limits = SchedulerLimits(
            chunk_tokens=4 * layout.block_tokens,
            prefill_tokens_a_step=4 * layout.block_tokens,
            max_running=max_running,
            max_waiting=100,
            sequence_tokens=self.cache.occupancy.most_blocks * layout.block_tokens,
        )
        self.node = None
        if options is not None:
            self.node = build_node(options, loaded, runner=self.runner, cache=self.cache)
        node = self.node
        self.scheduler = Scheduler(
            self.cache,
            limits,
            resume_of=node.resume if node is not None else None,
            checkpoints_of=node.state.checkpoints.during if node is not None else None,
        )
        self.metrics = WorkerMetrics()
        steps = StepLoop(
            self.runner,
            self.scheduler,
            cache=self.cache,
            decoder=ChatCodec(loaded.tokenizer),
            identity=WorkerIdentity(name, 1, limits.sequence_tokens),
            metrics=self.metrics,
        )
        if self.node is not None:
            restores = RestoreMetrics(self.metrics.registry)
            steps.attach(WithNode(self.node, self.scheduler, restores))
        self.engine = AsyncEngine(steps)

    def play(self, scenario: Callable[[], Awaitable[Any]]) -> Any:
        """Run `scenario` with the engine started; afterwards the books must balance."""

        async def main() -> Any:
            self.engine.start()
            try:
                return await scenario()
            finally:
                await self.engine.stop()

        result = asyncio.run(main())
        if self.engine.dead_because == "the engine has stopped":
            self.scheduler.check()
        return result

    async def ask(self, *requests: EngineRequest) -> list[Answer]:
        """Submit all at once, in order; wait for all."""
        streams = [self.engine.submit(request) for request in requests]
        return list(await asyncio.gather(*map(answer_of, streams, requests)))


class Answer:
    """What one request's stream said."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.admitted: Admitted | None = None
        self.finished: RequestFinished | None = None
        self.failed: RequestFailed | None = None
        self.deltas: list[Delta] = []

    def tokens(self, choice: int = 0) -> list[int]:
        return [s.token for d in self.deltas if d.index == choice for s in d.sampled]

    def logprobs(self, choice: int = 0) -> list[float]:
        sampled = [s for d in self.deltas if d.index == choice for s in d.sampled]
        return [s.chosen.logprob for s in sampled if s.chosen is not None]


async def answer_of(stream: Any, request: EngineRequest) -> Answer:
    answer = Answer(request)
    async for event in stream:
        match event:
            case Admitted():
                answer.admitted = event
            case Delta():
                answer.deltas.append(event)
            case RequestFinished():
                answer.finished = event
            case RequestFailed():
                answer.failed = event
    return answer


def request(
    name: str,
    prompt: Sequence[int],
    *,
    new: int = 20,
    sampling: Sampling = GREEDY,
    choices: int = 1,
    session: str | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=list(prompt),
        stopping=Stopping(max_tokens=new),
        sampling=sampling,
        choices=choices,
        session_id=session,
    )


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, 127, (length,), generator=generator).tolist()  # type: ignore[no-any-return]


def reference(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> list[Any]:
    """Log-probabilities [vocab] before each of `tokens`, from the bare ModelRunner."""
    runner = ModelRunner(checkpoint(name).model)
    block = runner.layout.block_tokens
    blocks = (len(prompt) + len(tokens)) // block + 1
    runner.allocate({c.name: blocks for c in runner.layout.components}, 1)
    runner.apply([ResetState(0)])
    table = Table({n: list(range(blocks)) for n in runner.layout.range_names}, 0)
    rows = [runner.prefill(table, prompt, 0)[-1]]
    for position, token in enumerate(tokens[:-1], start=len(prompt)):
        rows.append(runner.decode([DecodeRow(table, token, position)])[0])
    return [torch.log_softmax(row.float(), -1) for row in rows]


def worst_error(answer: Answer, *, choice: int = 0, name: str = "tiny-v4") -> float:
    """Largest difference of a chosen token's log-probability; greedy ones must also be best."""
    tokens = answer.tokens(choice)
    rows = reference(name, answer.request.prompt, tokens)
    errors = [
        abs(float(row[token]) - logprob)
        for row, token, logprob in zip(rows, tokens, answer.logprobs(choice), strict=True)
    ]
    if answer.request.sampling.temperature == 0:
        errors += [float(row.max() - row[token]) for row, token in zip(rows, tokens, strict=True)]
    return max(errors)


def assert_right(answer: Answer, *, choice: int = 0, name: str = "tiny-v4") -> None:
    assert answer.failed is None
    assert answer.finished is not None
    error = worst_error(answer, choice=choice, name=name)
    assert not error > TOLERANCE, error
    assert error == error, "NaN"


def assert_cold(model: str, prompt: Sequence[int], answer: dict[str, Any]) -> None:
    """The answer of a worker is a cold engine's, as far as it can tell."""
    tokens = answer["tokens"]
    rows = reference(model, prompt, tokens)
    for row, token, logprob in zip(rows, tokens, answer["logprobs"], strict=True):
        assert abs(float(row[token]) - logprob) <= TOLERANCE
