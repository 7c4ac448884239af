"""The engine's answers are those of the bare model, whatever runs beside them.

Reference: the Runner alone, one sequence, slots 0, 1, ... in order, no cache and no scheduler. It
is fed the engine's own tokens, so that one argmax flip does not hide the rest: every chosen
token's log-probability must agree, and a greedy one must be the best within the tolerance.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cache.effects import ResetState  # noqa: E402
from ownerserve.cache.hetero import HeteroCache  # noqa: E402
from ownerserve.cache.table import Table  # noqa: E402
from ownerserve.engines.hf.checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from ownerserve.engines.hf.codec import Codec  # noqa: E402
from ownerserve.engines.hf.engine import Engine  # noqa: E402
from ownerserve.engines.hf.inbox import EngineDead  # noqa: E402
from ownerserve.engines.hf.loop import StepLoop  # noqa: E402
from ownerserve.engines.hf.metrics import WorkerMetrics  # noqa: E402
from ownerserve.engines.hf.requests import (  # noqa: E402
    Admitted,
    Delta,
    ExecutionMode,
    Failed,
    Finished,
    RejectReason,
    Request,
    Sampling,
    Stopping,
)
from ownerserve.engines.hf.runner import DecodeRow, Runner  # noqa: E402
from ownerserve.engines.hf.scheduler import Scheduler  # noqa: E402
from ownerserve.engines.hf.status import Identity  # noqa: E402
from ownerserve.engines.hf.step import Limits  # noqa: E402

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
GREEDY = Sampling(temperature=0.0, logprobs=1)


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    torch.set_num_threads(1)
    return load_checkpoint(name)


class Rig:
    """An engine with pools of a chosen size, and what came out of it."""

    def __init__(self, name: str = "tiny-v4", *, blocks: int = 200, max_running: int = 8) -> None:
        loaded = checkpoint(name)
        self.runner = Runner(loaded.model)
        layout = self.runner.layout
        slots = {c.name: blocks for c in layout.components}
        self.runner.allocate(slots, max_running)
        self.cache = HeteroCache(layout, slots, max_running)
        limits = Limits(
            chunk_tokens=4 * layout.block_tokens,
            prefill_tokens_a_step=4 * layout.block_tokens,
            max_running=max_running,
            max_waiting=100,
            sequence_tokens=blocks * layout.block_tokens,
        )
        self.scheduler = Scheduler(self.cache, limits)
        loop = StepLoop(
            self.runner,
            self.scheduler,
            cache=self.cache,
            decoder=Codec(loaded.tokenizer),
            identity=Identity(name, 1, limits.sequence_tokens),
            metrics=WorkerMetrics(),
        )
        self.engine = Engine(loop)

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

    async def ask(self, *requests: Request) -> list[Answer]:
        """Submit all at once, in order; wait for all."""
        streams = [self.engine.submit(request) for request in requests]
        return list(await asyncio.gather(*map(_answer, streams, requests)))


class Answer:
    """What one request's stream said."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.admitted: Admitted | None = None
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.deltas: list[Delta] = []

    def tokens(self, choice: int = 0) -> list[int]:
        return [s.token for d in self.deltas if d.index == choice for s in d.sampled]

    def logprobs(self, choice: int = 0) -> list[float]:
        sampled = [s for d in self.deltas if d.index == choice for s in d.sampled]
        return [s.chosen.logprob for s in sampled if s.chosen is not None]


async def _answer(stream: Any, request: Request) -> Answer:
    answer = Answer(request)
    async for event in stream:
        match event:
            case Admitted():
                answer.admitted = event
            case Delta():
                answer.deltas.append(event)
            case Finished():
                answer.finished = event
            case Failed():
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
) -> Request:
    return Request(
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
    """Log-probabilities [vocab] before each of `tokens`, from the bare Runner."""
    runner = Runner(checkpoint(name).model)
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


@pytest.mark.parametrize("name", ["tiny-v4", "tiny-gemma3", "tiny-qwen3next"])
def test_alone_and_under_mixed_load(name: str) -> None:
    rig = Rig(name)
    lengths = (5, 150, 33, 64)

    async def scenario() -> list[Answer]:
        [alone] = await rig.ask(request("alone", text(90), new=12))
        loaded = [request(f"r{n}", text(n, seed=n), new=6 + n % 5) for n in lengths]
        return [alone, *await rig.ask(*loaded)]

    for answer in rig.play(scenario):
        assert_right(answer, name=name)
        assert len(answer.tokens()) == answer.request.stopping.max_tokens


def test_preempted_and_resumed() -> None:
    rig = Rig(blocks=9)
    requests = [request(f"r{i}", text(60, seed=i), new=30) for i in range(3)]
    answers = rig.play(lambda: rig.ask(*requests))
    assert rig.scheduler.counts.preemptions > 0
    for answer in answers:
        assert_right(answer)
        assert len(answer.tokens()) == 30


@pytest.mark.parametrize("name", ["tiny-v4", "tiny-qwen3next"])
def test_the_next_turn_reuses_the_last_one(name: str) -> None:
    rig = Rig(name)

    async def scenario() -> list[Answer]:
        [one] = await rig.ask(request("one", text(100), new=30, session="s"))
        prompt = [*one.request.prompt, *one.tokens(), *text(40, seed=9)]
        return [one, *await rig.ask(request("two", prompt, session="s"))]

    one, two = rig.play(scenario)
    assert one.admitted == Admitted(0, ExecutionMode.COLD_PREFILL)
    # 129 tokens were computed; the decode's snapshot at 128 is where the next turn goes on
    assert two.admitted == Admitted(128, ExecutionMode.DIRECT_APPEND)
    assert two.finished.cached_tokens == 128
    assert_right(two, name=name)


FAMILIES = ("tiny-v4", "tiny-qwen3", "tiny-gemma3", "tiny-gptoss", "tiny-qwen3next")


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_stay_right_while_others_evict_them(name: str) -> None:
    """Three sessions take turns in pools that hold one and a half of them."""
    rig = Rig(name, blocks=18, max_running=2)
    contexts = {session: text(64, seed=i) for i, session in enumerate("abc")}

    async def scenario() -> list[Answer]:
        answers = []
        for turn in range(3):
            for i, (session, context) in enumerate(contexts.items()):
                asked = request(f"{session}{turn}", context, new=18, session=session)
                [answer] = await rig.ask(asked)
                contexts[session] = [*context, *answer.tokens(), *text(14, seed=10 * turn + i)]
                answers.append(answer)
        return answers

    answers = rig.play(scenario)
    counters = rig.cache.counters
    assert counters.evictions + counters.points_lost["point_evicted"] > 0
    later = [a.admitted.cached_tokens for a in answers[3:] if a.admitted is not None]
    assert any(later), "nothing was ever re-used"
    assert min(later) < max(later), "nothing was ever lost"
    for answer in answers:
        assert_right(answer, name=name)


@pytest.mark.parametrize("component", ["csa_main", "csa_overlap", "hca", "swa"])
def test_corruption_control(component: str) -> None:
    """The comparison above sees a wrong cache: bytes of one component are negated in between."""
    rig = Rig()

    async def scenario() -> Answer:
        [one] = await rig.ask(request("one", text(96), new=40, session="s"))
        for slot in range(8):
            values = bytearray(rig.runner.read_slot(component, slot))
            values[3::4] = bytes(byte ^ 0x80 for byte in values[3::4])  # fp32 sign bits
            rig.runner.write_slot(component, slot, bytes(values))
        prompt = [*one.request.prompt, *one.tokens(), *text(10, seed=9)]
        [two] = await rig.ask(request("two", prompt, session="s"))
        return two

    two = rig.play(scenario)
    assert two.finished.cached_tokens == 128
    assert not worst_error(two) <= TOLERANCE


def test_choices_share_the_prompt_and_are_each_right() -> None:
    rig = Rig(max_running=3)  # the fourth finds no place to fork into
    sampling = Sampling(temperature=1.0, seed=3, logprobs=0)
    [answer] = rig.play(lambda: rig.ask(request("n", text(50), sampling=sampling, choices=4)))
    texts = [answer.tokens(choice) for choice in range(4)]
    assert len({tuple(tokens) for tokens in texts}) == 4
    for choice in range(4):
        assert_right(answer, choice=choice)
    assert answer.finished.completion_tokens == 80


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_preempted() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=11, logprobs=0)
    mine = request("mine", text(40, seed=5), new=30, sampling=sampling)
    crowd = [request(f"r{i}", text(60, seed=i), new=30) for i in range(2)]
    roomy, tight = Rig(), Rig(blocks=9)
    [alone] = roomy.play(lambda: roomy.ask(mine))
    crowded = tight.play(lambda: tight.ask(*crowd, mine))[-1]
    assert tight.scheduler.counts.preemptions > 0
    assert crowded.tokens() == alone.tokens()
    assert_right(crowded)


def test_too_long_is_refused_and_the_rest_goes_on() -> None:
    rig = Rig(blocks=12)
    big, small = rig.play(lambda: rig.ask(request("big", text(190)), request("small", text(20))))
    assert big.failed.reason is RejectReason.CONTEXT_LENGTH
    assert_right(small)


def test_abort_gives_the_pool_back() -> None:
    rig = Rig()
    rooms = rig.cache.rooms

    async def scenario() -> None:
        stream = rig.engine.submit(request("a", text(100), new=1000, choices=2))
        for _ in range(6):
            await stream.next()
        rig.engine.abort("a")
        status = await rig.engine.status(5)
        assert (status.running, status.waiting) == (0, 0)

    rig.play(scenario)
    assert rooms.states.free == rooms.states.capacity
    assert rooms.blocks.free + rooms.evictable_blocks() == rooms.blocks.capacity
    assert rig.scheduler.counts.aborted == 1


def test_a_crash_of_the_engine_thread_ends_everything_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    async def scenario() -> Answer:
        stream = rig.engine.submit(request("a", text(100)))
        await stream.next()
        monkeypatch.setattr(rig.runner, "decode", broken)
        answer = await _answer(stream, request("a", text(100)))
        with pytest.raises(EngineDead, match="device lost"):
            rig.engine.submit(request("b", text(3)))
        with pytest.raises(EngineDead, match="device lost"):
            await rig.engine.status(5)
        return answer

    answer = rig.play(scenario)
    assert answer.failed.reason is RejectReason.ENGINE_DEAD
    assert "device lost" in answer.failed.message


def test_a_stop_ends_open_streams() -> None:
    rig = Rig()

    async def scenario() -> Any:
        stream = rig.engine.submit(request("a", text(20), new=1000))
        await stream.next()
        await rig.engine.stop()
        return await _answer(stream, request("a", text(20)))

    assert rig.play(scenario).failed.reason is RejectReason.ENGINE_DEAD
