"""A session's state comes back part by part into a small device, and each answer is right.

Truth as in engine_rig: log-probabilities of a cold run of the bare ModelRunner.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.model.tiny import TINY_MODELS  # noqa: E402
from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from ownerserve.store.tiers.tiered import TieredStore  # noqa: E402
from tests.engines.hf.test_restore import (  # noqa: E402
    first_turn,
    metric,
    node_rig,
    second_turn,
    spilled,
    with_store,
)
from tests.support.hf.engine_rig import Rig, assert_right, request, text  # noqa: E402

pytestmark = pytest.mark.engine

B = 16
PART = 8
"""Blocks of a part, and of a record."""
WAIT_S = 120.0


def most_reserved(rig: Rig) -> list[int]:
    """The blocks that are reserved as bytes are written into slots, each time."""
    seen, write = list[int](), rig.runner.write_slots

    def watched(name: str, slots: Any, data: memoryview) -> None:
        seen.append(rig.cache.ingest.counts()[0])
        write(name, slots, data)

    rig.runner.write_slots = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_restarted_worker_goes_on_from_parts(tmp_path: Path, name: str) -> None:
    one = first_turn(tmp_path, name)
    rig = node_rig(tmp_path, name, part_tokens=PART * B)
    reserved = most_reserved(rig)
    two = second_turn(rig, one)
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.FETCH
    assert two.admitted.cached_tokens == 512
    assert metric(rig, 'ownerserve_restores_total{outcome="loaded"}') == 1
    assert max(reserved) <= PART < 512 // B
    assert_right(two, name=name)


HAVE_POINTS = [name for name in sorted(TINY_MODELS) if name != "tiny-qwen3"]


@pytest.mark.parametrize("name", HAVE_POINTS)
def test_point_slots_give_way_to_what_comes(tmp_path: Path, name: str) -> None:
    """A session needs more blocks at once than there are, until points have given way."""
    one = first_turn(tmp_path, name)
    options = with_store(tmp_path, name, part_tokens=0)
    rig = Rig(name, blocks=20, points=(2, 60), max_running=4, options=options)
    pressure = rig.cache.pressure  # what has come is all there is: room is made for turns alone
    pressure.watermarks = msgspec.structs.replace(pressure.watermarks, low=0.0, high=0.0)
    two = second_turn(rig, one)
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.FETCH
    assert two.admitted.cached_tokens == 512
    assert metric(rig, 'ownerserve_restores_total{outcome="loaded"}') == 1
    assert rig.cache.occupancy.blocks.capacity > 20
    assert_right(two, name=name)


def test_who_was_preempted_for_a_part_runs_on_once_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older turn grows into the room that a part holds, and has to make way; the part comes,
    and its turn waits in line behind the older one."""
    first_turn(tmp_path)
    rig = node_rig(tmp_path, blocks=40, part_tokens=PART * B, step_tokens=4 * B)
    reading, may_read, read = Event(), Event(), TieredStore.read

    def slow(*args: Any) -> Any:
        reading.set()
        assert may_read.wait(WAIT_S)
        return read(*args)

    monkeypatch.setattr(TieredStore, "read", slow)

    async def scenario() -> tuple[Any, Any]:
        older = asyncio.create_task(rig.ask(request("older", text(24 * B, seed=7), new=12 * B)))
        while not rig.cache.running:
            await asyncio.sleep(0.001)
        later = asyncio.create_task(rig.ask(request("later", text(500, seed=1), session="s")))
        while not reading.is_set():
            await asyncio.sleep(0.001)
        while not rig.scheduler.counts.preemptions:
            await asyncio.sleep(0.001)
        while not rig.scheduler._starved:  # noqa: SLF001  # it has looked for room in vain
            await asyncio.sleep(0.001)
        may_read.set()
        [first] = await asyncio.wait_for(older, WAIT_S)
        [second] = await asyncio.wait_for(later, WAIT_S)
        return first, second

    for answer in rig.play(scenario):
        assert_right(answer)


def test_52_sessions_over_room_for_one_and_a_half_all_go_on(tmp_path: Path) -> None:
    """All come back at once; each is brought in its turn, in parts, and none is left behind."""
    rig = node_rig(tmp_path, blocks=32, part_tokens=PART * B, step_tokens=B)
    prompts = {n: text(19 * B + 5, seed=n) for n in range(52)}

    async def scenario() -> list[Any]:
        for n, prompt in prompts.items():
            await rig.ask(request(f"{n}.0", prompt, new=1, session=f"s{n}"))
        await spilled(rig, len(prompts))
        reserved = most_reserved(rig)
        again = [
            request(f"{n}.1", [*prompt, *text(B, seed=100 + n)], new=4, session=f"s{n}")
            for n, prompt in prompts.items()
        ]
        answers = await asyncio.wait_for(rig.ask(*again), WAIT_S)
        assert max(reserved) <= PART * rig.scheduler.limits.max_running
        return answers

    answers = rig.play(scenario)
    # All but the one that was on the device, whose state is as good as the others' to evict.
    whole = [answer for answer in answers if answer.admitted.cached_tokens == 19 * B]
    assert len(whole) >= 51
    assert all(answer.admitted.mode is ExecutionMode.FETCH for answer in whole[:50])
    for answer in answers:
        assert_right(answer)
