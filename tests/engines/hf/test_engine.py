"""The engine's answers are those of the bare model, whatever runs beside them (see engine_rig)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.engine import loop  # noqa: E402
from ownerserve.engines.hf.engine.commands import EngineDead  # noqa: E402
from ownerserve.engines.hf.node.port import HfPort  # noqa: E402
from ownerserve.engines.hf.scheduling.requests import (  # noqa: E402
    Admitted,
    Sampling,
    WorkerRefusal,
)
from ownerserve.kv.ids import TurnId  # noqa: E402
from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from ownerserve.node.vocabulary.engine_port import LayerProgress  # noqa: E402
from tests.support.hf.engine_rig import (  # noqa: E402
    TOLERANCE,
    Answer,
    Rig,
    answer_of,
    assert_right,
    request,
    text,
    worst_error,
)
from tests.support.waits import until_async  # noqa: E402

pytestmark = pytest.mark.engine


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


def test_who_watches_a_turn_hears_of_each_of_its_forwards() -> None:
    """All chunks of its prompt and all tokens that it computes, of nobody else's."""
    rig = Rig("tiny-qwen3")
    told: list[LayerProgress] = []
    HfPort(rig.runner).watch_layers(TurnId("watched.0"), told.append)
    requests = [request("watched", text(90), new=4), request("other", text(70, seed=1), new=9)]
    answers = rig.play(lambda: rig.ask(*requests))
    assert all(answer.failed is None for answer in answers)
    layers = max(one.layers["dense"] for one in told)
    spans = [(one.start, one.end) for one in told if one.layers["dense"] == layers]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == 90 + 3, "the last token is never computed"
    assert len(told) == len(spans) * layers


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
    assert big.failed.reason is WorkerRefusal.CONTEXT_LENGTH
    assert_right(small)


def test_abort_gives_the_pool_back() -> None:
    rig = Rig()
    rooms = rig.cache.occupancy

    async def scenario() -> None:
        stream = rig.engine.submit(request("a", text(100), new=1000, choices=2))
        for _ in range(6):
            await stream.next()
        rig.engine.abort("a")
        load = (await rig.engine.status(5)).load
        assert (load.running_sequences, load.waiting_sequences) == (0, 0)
        idle = b"ownerserve_running_sequences 0.0"
        await until_async(
            lambda: idle in rig.metrics.render(), what="metrics, though nothing steps"
        )

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
        answer = await answer_of(stream, request("a", text(100)))
        with pytest.raises(EngineDead, match="device lost"):
            rig.engine.submit(request("b", text(3)))
        with pytest.raises(EngineDead, match="device lost"):
            await rig.engine.status(5)
        return answer

    answer = rig.play(scenario)
    assert answer.failed.reason is WorkerRefusal.ENGINE_DEAD
    assert "device lost" in answer.failed.message


def test_a_crash_while_a_command_is_handled_ends_that_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("books lost")

    async def arrives() -> Answer:
        monkeypatch.setattr(rig.scheduler, "arrive", broken)
        async with asyncio.timeout(30):
            return await answer_of(rig.engine.submit(request("a", text(9))), request("a", text(9)))

    async def is_asked() -> None:
        monkeypatch.setattr(loop, "snapshot", broken)
        with pytest.raises(EngineDead, match="books lost"):
            await rig.engine.cache(30)

    rig = Rig()
    assert rig.play(arrives).failed.reason is WorkerRefusal.ENGINE_DEAD
    rig = Rig()
    rig.play(is_asked)


def test_a_stop_ends_open_streams() -> None:
    rig = Rig()

    async def scenario() -> Any:
        stream = rig.engine.submit(request("a", text(20), new=1000))
        await stream.next()
        await rig.engine.stop()
        return await answer_of(stream, request("a", text(20)))

    assert rig.play(scenario).failed.reason is WorkerRefusal.ENGINE_DEAD
