"""Room runs short in the middle of conversations: what goes is copied first, answers stay right."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cache.counters import LossCause  # noqa: E402
from ownerserve.cache.pressure import Watermarks  # noqa: E402
from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from ownerserve.kv.units import MIB  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.hf.engine_rig import Answer, Rig, assert_right, request, text  # noqa: E402
from tests.support.waits import WAIT_S, until_async  # noqa: E402

pytestmark = pytest.mark.engine


def watch(rig: Rig, marks: Watermarks) -> None:
    pressure = rig.cache.pressure
    pressure.watermarks = msgspec.structs.replace(marks, tier=pressure.watermarks.tier)


async def converse(rig: Rig, *, sessions: int, turns: int) -> list[Answer]:
    """Sessions take turns; between two what is being copied comes to its end."""
    answers, prompts = [], {n: text(120 + 40 * n, seed=n) for n in range(sessions)}
    for turn in range(turns):
        for n in range(sessions):
            [answer] = await rig.ask(request(f"{n}.{turn}", prompts[n], new=8, session=f"s{n}"))
            answers.append(answer)
            prompts[n] += [*answer.tokens(), *text(30, seed=10 + n)]
            await copied(rig)
    return answers


async def copied(rig: Rig) -> None:
    """Until nothing is being copied, after the engine has looked a few times."""
    for _ in range(3):
        await rig.engine.status(WAIT_S)
    if rig.node is not None:
        spills, pressure = rig.node.state.idle_spills, rig.cache.pressure
        await until_async(lambda: not (pressure.open_spills or spills.is_busy))


@pytest.mark.parametrize("name", ["tiny-v4", "tiny-qwen3next"])
def test_point_state_is_spilled_in_mid_conversation(tmp_path: Path, name: str) -> None:
    """Room for the point state of two of four sessions; nothing is put away by time."""
    node = NodeSettings(spill_after_s=1000.0)
    options = WorkerOptions(model=name, store=tmp_path, node=node)
    rig = Rig(name, blocks=200, points=6, max_running=2, options=options)
    watch(rig, Watermarks(low=0.4, high=0.7, idle_s=0.0))
    answers = rig.play(lambda: converse(rig, sessions=4, turns=3))
    counters = rig.cache.counters
    assert counters.spilled_points > 0 and counters.failed_spills == 0
    assert counters.points_lost[LossCause.POINT_EVICTED] > 0, "evicted"
    assert counters.points_lost[LossCause.SUPERSEDED] > 0, "dropped"
    modes = [answer.admitted.mode for answer in answers if answer.admitted]
    assert ExecutionMode.FETCH in modes, "and brought back"
    assert rig.node is not None and not rig.cache.pressure.open_spills
    rig.node.state.check()
    for answer in answers:
        assert_right(answer, name=name)


def test_blocks_go_after_their_sessions_are_stored(tmp_path: Path) -> None:
    """40 blocks for sessions of 60: each next turn finds in the store what had to go."""
    options = WorkerOptions(
        model="tiny-v4",
        store=tmp_path,
        host_cache_bytes=8 * MIB,
        node=NodeSettings(spill_after_s=1000.0),
    )
    rig = Rig(blocks=40, max_running=2, options=options)
    watch(rig, Watermarks(low=0.3, high=0.6))
    answers = rig.play(lambda: converse(rig, sessions=4, turns=3))
    counters = rig.cache.counters
    assert rig.node is not None
    assert counters.evicted_tokens > 300 and rig.node.state.idle_spills.counts["sessions"] > 0
    again = [answer.admitted for answer in answers[4:] if answer.admitted]
    fetched = sum(admitted.mode is ExecutionMode.FETCH for admitted in again)
    assert fetched >= 2, "what was evicted had been stored"
    for answer in answers:
        assert_right(answer)


def test_memory_has_a_price_when_others_go_for_a_turn(tmp_path: Path) -> None:
    """Three sessions of 16 blocks in 40: who comes back evicts somebody, and its plan says what
    that costs; the first turns, for whom there was room, paid nothing."""
    node = NodeSettings(spill_after_s=0.01)
    rig = Rig(
        blocks=40, max_running=2, options=WorkerOptions(model="tiny-v4", store=tmp_path, node=node)
    )
    prompts = {name: text(240, seed=seed) for seed, name in enumerate("abc")}

    async def scenario() -> list[Answer]:
        answers: list[Answer] = []
        spills = rig.node.state.idle_spills
        for turn in range(3):
            for name in prompts:
                [answer] = await rig.ask(
                    request(f"{name}{turn}", prompts[name], new=8, session=name)
                )
                answers.append(answer)
                prompts[name] += [*answer.tokens(), *text(20, seed=turn)]
                await until_async(lambda: spills.counts["sessions"] >= len(answers))
                await copied(rig)
        return answers

    answers = rig.play(scenario)
    plans = [answer.admitted.plan for answer in answers if answer.admitted]
    memory_ms = [float(plan.split("memory ")[1].split(" ms")[0]) for plan in plans if plan]
    assert memory_ms and max(memory_ms) > 0.0, plans
    assert not any(plans[:3]), "nothing was brought for those"
    for answer in answers:
        assert_right(answer)


def test_without_a_store_room_is_made_all_the_same() -> None:
    rig = Rig(blocks=40, points=8, max_running=2)
    watch(rig, Watermarks(low=0.3, high=0.6))
    answers = rig.play(lambda: converse(rig, sessions=4, turns=2))
    counters = rig.cache.counters
    assert counters.relief_runs > 0 and counters.evicted_tokens > 0
    assert rig.cache.occupancy.blocks.free >= 0.3 * 40, "kept free between turns"
    assert counters.spilled_points == 0
    for answer in answers:
        assert_right(answer)


def test_interior_checkpoints_are_taken_where_chunks_end(tmp_path: Path) -> None:
    """Every 64 tokens (a chunk here): a branch inside a recurrent model's prompt goes on there."""
    node = NodeSettings(spill_after_s=1000.0)
    name = "tiny-qwen3next"
    options = WorkerOptions(model=name, store=tmp_path, node=node, checkpoints="periodic:64")
    rig = Rig(name, max_running=2, options=options)
    chunk = 4 * rig.runner.layout.block_tokens
    assert 64 % chunk == 0 or chunk % 64 == 0
    prompt = text(500, seed=1)

    async def scenario() -> Answer:
        await rig.ask(request("one", prompt, session="s"))
        [two] = await rig.ask(request("two", [*prompt[:300], *text(40, seed=5)], session="t"))
        return two

    two = rig.play(scenario)
    step = max(64, chunk)
    assert two.admitted is not None
    assert two.admitted.cached_tokens == 300 // step * step, "recurrent state was kept there"
    assert_right(two, name=name)
