"""State that left the device comes back by plan, or is a miss: the answer is right either way.

Truth as in engine_rig: log-probabilities of a cold run of the bare ModelRunner, within 1e-4 in
fp32.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ownerserve.store.tiers.tiered import TieredStore

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.engines.hf.model.tiny import TINY_MODELS  # noqa: E402
from ownerserve.engines.hf.scheduling.requests import Admitted  # noqa: E402
from ownerserve.kv.ids import SessionId, TurnId  # noqa: E402
from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import (  # noqa: E402
    Admit,
    Probe,
    Reject,
    Released,
    ReleaseSession,
    Reserve,
    Reserved,
    Seed,
    Status,
    StatusIs,
)
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from ownerserve.store.disk.aio import ReadQueue  # noqa: E402
from ownerserve.store.format.segment import DirectRead, Segment  # noqa: E402
from tests.support.hf.engine_rig import (  # noqa: E402
    TOLERANCE,
    Answer,
    Rig,
    assert_right,
    request,
    text,
    worst_error,
)
from tests.support.metric_lines import summed  # noqa: E402

pytestmark = pytest.mark.engine

PROMPT = text(500, seed=1)
WAIT_S = 300.0


def node_rig(store: Path, name: str = "tiny-v4", *, blocks: int = 200, **settings: Any) -> Rig:
    """An engine with a store; `spill_after_s` is short, whatever else is set."""
    return Rig(name, blocks=blocks, max_running=4, options=with_store(store, name, **settings))


def with_store(store: Path, name: str, **settings: Any) -> WorkerOptions:
    """Those of a worker with a store."""
    chosen = NodeSettings(**{"spill_after_s": 0.02, **settings})
    return WorkerOptions(model=name, store=store, node=chosen)


async def spilled(rig: Rig, sessions: int = 1) -> None:
    """Wait until that many sessions were copied to the store."""
    assert rig.node is not None
    spills, until = rig.node.state.idle_spills, time.monotonic() + WAIT_S
    while spills.counts["sessions"] < sessions or spills.is_busy:
        assert time.monotonic() < until, spills.counts
        await asyncio.sleep(0.01)


def first_turn(store: Path, name: str = "tiny-v4", new: int = 20) -> Answer:
    """One turn in a worker's life, spilled; then the worker stops."""
    rig = node_rig(store, name)

    async def scenario() -> Answer:
        [one] = await rig.ask(request("one", PROMPT, new=new, session="s"))
        await spilled(rig)
        return one

    one: Answer = rig.play(scenario)
    return one


def second_turn(rig: Rig, one: Answer) -> Answer:
    """The session's next turn, on another worker."""
    prompt = [*PROMPT, *one.tokens(), *text(40, seed=9)]
    [two] = rig.play(lambda: rig.ask(request("two", prompt, session="s")))
    assert isinstance(two, Answer)
    return two


def metric(rig: Rig, start: str) -> float:
    return summed(rig.metrics.render().decode(), start)


def computed(answer: Answer) -> int:
    """Prompt tokens that went through the model."""
    assert answer.admitted is not None
    return len(answer.request.prompt) - answer.admitted.cached_tokens


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_restarted_worker_goes_on_from_its_store(tmp_path: Path, name: str) -> None:
    one = first_turn(tmp_path, name)
    rig = node_rig(tmp_path, name)
    two = second_turn(rig, one)
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.FETCH
    assert two.admitted.cached_tokens == 512
    assert metric(rig, 'ownerserve_restores_total{outcome="loaded"}') == 1
    assert_right(two, name=name)


def test_another_models_state_is_never_found(tmp_path: Path) -> None:
    one = first_turn(tmp_path, "tiny-gemma3")
    rig = node_rig(tmp_path, "tiny-v4")
    two = second_turn(rig, one)
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.COLD_PREFILL
    assert_right(two)


@pytest.mark.parametrize("every", [1, 3])
def test_a_flipped_byte_in_the_store_is_a_miss(tmp_path: Path, every: int) -> None:
    """Every record, or every third: what can't be verified is computed, and the answer is right."""
    one = first_turn(tmp_path)
    [segment] = (tmp_path / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    headers = [at for at in range(0, len(data), 4096) if data[at : at + 4] == data[:4]]
    assert len(headers) > 10
    for at in headers[::every]:
        data[at + 4096 + 17] ^= 1
    segment.write_bytes(data)
    rig = node_rig(tmp_path)
    two = second_turn(rig, one)
    assert metric(rig, "ownerserve_restore_misses_total") >= 1
    assert two.admitted is not None and two.admitted.cached_tokens < 512
    assert_right(two)


@pytest.mark.parametrize("component", ["csa_main", "csa_overlap", "hca", "swa"])
def test_corruption_control(tmp_path: Path, component: str) -> None:
    """The comparison sees wrong state: bytes are changed between verification and the pool."""
    one = first_turn(tmp_path)
    rig = node_rig(tmp_path)
    write = rig.runner.write_slots

    def negated(name: str, slots: Any, data: memoryview) -> None:
        values = bytearray(data)
        if name == component:
            values[3::4] = bytes(byte ^ 0x80 for byte in values[3::4])  # fp32 sign bits
        write(name, slots, memoryview(values))

    rig.runner.write_slots = negated  # type: ignore[method-assign]
    two = second_turn(rig, one)
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.FETCH
    assert not worst_error(two) <= TOLERANCE


def test_a_branch_is_replayed_and_not_prefilled(tmp_path: Path) -> None:
    """Global KV of the shared 300 tokens is on the device, no window state is: 4 window layers of
    16 rows need 60 tokens again, from the block boundary before them."""
    rig = node_rig(tmp_path)
    branch = [*PROMPT[:300], *text(40, seed=5)]

    async def scenario() -> Answer:
        await rig.ask(request("one", PROMPT, session="s"))
        [two] = await rig.ask(request("two", branch, session="t"))
        return two

    two = rig.play(scenario)
    # floor(300 / 16) * 16 = 288 kept; 288 - 60 = 228, in the block that begins at 224
    restore = "replay + prefill"
    assert two.admitted == Admitted(224, ExecutionMode.SEED, 64, restore)
    assert computed(two) == 340 - 224
    assert_right(two)


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-gptoss"])
def test_windows_of_other_families_are_replayed(tmp_path: Path, name: str) -> None:
    rig = node_rig(tmp_path, name)

    async def scenario() -> Answer:
        await rig.ask(request("one", PROMPT, session="s"))
        [two] = await rig.ask(request("two", [*PROMPT[:300], *text(40, seed=5)], session="t"))
        return two

    two = rig.play(scenario)
    reach = rig.runner.planned_state().exact_replay_tokens
    assert two.admitted is not None and reach is not None
    assert reach <= two.admitted.replayed_tokens < reach + 16
    assert_right(two, name=name)


def test_the_same_branch_without_a_node_is_prefilled() -> None:
    rig = Rig()

    async def scenario() -> Answer:
        await rig.ask(request("one", PROMPT, session="s"))
        [two] = await rig.ask(request("two", [*PROMPT[:300], *text(40, seed=5)], session="t"))
        return two

    assert computed(rig.play(scenario)) == 340


def test_a_branch_from_the_store_is_loaded_and_replayed(tmp_path: Path) -> None:
    """The third record of 8 blocks is shared in part: of 300 tokens 288 come back, and not 256;
    60 of them run again."""
    first_turn(tmp_path)
    rig = node_rig(tmp_path)
    branch = [*PROMPT[:300], *text(40, seed=5)]
    [two] = rig.play(lambda: rig.ask(request("two", branch, session="t")))
    assert two.admitted is not None
    assert two.admitted.restore == "load_global + replay + prefill"
    assert (two.admitted.cached_tokens, two.admitted.replayed_tokens) == (224, 64)
    assert two.admitted.mode is ExecutionMode.FETCH
    assert "saves" in two.admitted.plan, "priced, and taken"
    assert_right(two)


def test_recurrent_state_is_never_replayed(tmp_path: Path) -> None:
    rig = node_rig(tmp_path, "tiny-qwen3next")

    async def scenario() -> Answer:
        await rig.ask(request("one", PROMPT, session="s"))
        [two] = await rig.ask(request("two", [*PROMPT[:300], *text(40, seed=5)], session="t"))
        return two

    two = rig.play(scenario)
    assert computed(two) == 340
    assert_right(two, name="tiny-qwen3next")


def test_idle_sessions_are_evicted_and_come_back(tmp_path: Path) -> None:
    """Room for one and a half sessions: each turn finds its state in the store."""
    rig = node_rig(tmp_path, blocks=60)

    async def scenario() -> list[Answer]:
        answers, prompts = [], {n: text(500, seed=n) for n in range(3)}
        for turn in range(2):
            for n in range(3):
                [answer] = await rig.ask(request(f"{n}.{turn}", prompts[n], session=f"s{n}"))
                await spilled(rig, turn * 3 + n + 1)
                answers.append(answer)
                prompts[n] += [*answer.tokens(), *text(30, seed=10 + n)]
        return answers

    answers = rig.play(scenario)
    assert rig.cache.counters.evicted_tokens > 500
    modes = [answer.admitted.mode for answer in answers]
    assert modes == [ExecutionMode.COLD_PREFILL] * 3 + [ExecutionMode.FETCH] * 3
    assert all(answer.admitted.cached_tokens == 512 for answer in answers[3:])
    for answer in answers:
        assert_right(answer)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_failing_medium_does_not_hurt_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    one = first_turn(tmp_path)
    rig = node_rig(tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def unreadable(_: ReadQueue, loads: Sequence[DirectRead]) -> Iterator[tuple[int, int]]:
        yield from ((index, -errno.EIO) for index in range(len(loads)))

    monkeypatch.setattr(Segment, call, broken)
    if call == "read":
        monkeypatch.setattr(ReadQueue, "run", unreadable)
    two = second_turn(rig, one)
    outcome = "miss" if call == "read" else "loaded"
    assert metric(rig, f'ownerserve_restores_total{{outcome="{outcome}"}}') == 1
    assert_right(two)


def test_a_late_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first_turn(tmp_path)
    rig = node_rig(tmp_path, restore_deadline_s=0.1)
    read = TieredStore.read

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return read(*args)

    monkeypatch.setattr(TieredStore, "read", slow)
    two = second_turn(rig, one)
    assert metric(rig, 'ownerserve_restores_total{outcome="late"}') == 1
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.COLD_PREFILL
    assert_right(two)


def test_host_memory_alone_brings_back_what_was_evicted() -> None:
    options = WorkerOptions(
        model="tiny-v4", host_cache_bytes=8 << 20, node=NodeSettings(spill_after_s=0.02)
    )
    rig = Rig(blocks=45, max_running=4, options=options)

    async def scenario() -> Answer:
        [one] = await rig.ask(request("one", PROMPT, session="s"))
        await spilled(rig)
        await rig.ask(request("other", text(600, seed=2)))
        prompt = [*PROMPT, *one.tokens(), *text(40, seed=9)]
        [two] = await rig.ask(request("two", prompt, session="s"))
        return two

    two = rig.play(scenario)
    assert two.admitted.mode is ExecutionMode.FETCH
    assert_right(two)


def test_the_node_answers_admission_on_the_engine_thread(tmp_path: Path) -> None:
    rig = node_rig(tmp_path)

    async def scenario() -> list[object]:
        [one] = await rig.ask(request("one", PROMPT, session="s"))
        tokens = len(PROMPT) + len(one.tokens()) - 1
        asked: list[Any] = [
            Status(),
            Probe(Seed(tokens)),
            Probe(Seed(tokens), SessionId("s")),
            Probe(Seed(tokens), SessionId("another")),
            Reserve(TurnId("two"), Seed(tokens)),
            ReleaseSession(SessionId("s")),
            ReleaseSession(SessionId("s")),
        ]
        return [await asyncio.wrap_future(rig.engine.call(item)) for item in asked]

    status, quote, of_it, of_another, place, released, gone = rig.play(scenario)
    assert isinstance(status, StatusIs) and status.status.kv_bytes_free > 0
    assert quote == Admit(0)
    assert isinstance(of_it, Admit) and (of_it.resident_tokens or 0) > len(PROMPT) // 2
    assert of_another == Admit(0, resident_tokens=0, restorable_tokens=0)
    assert isinstance(place, Reserved)
    assert released == Released()
    assert gone == Reject(WorkerRefusal.UNKNOWN_SESSION)


@pytest.mark.usefixtures("measured_prices")
def test_measured_costs_outlive_the_worker(tmp_path: Path) -> None:
    first_turn(tmp_path)
    rig = node_rig(tmp_path)
    assert rig.node is not None
    sources = rig.node.state.costs.sources()
    rig.play(lambda: rig.ask(request("x", text(20))))
    assert sources["prefill"] == "measured"
