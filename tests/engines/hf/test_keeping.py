"""What a running worker keeps below the device: which state, when, at what price, for how long."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402

from ownerserve.cli.main import cli  # noqa: E402
from ownerserve.engines.hf import build  # noqa: E402
from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.kv.clock import ManualClock  # noqa: E402
from ownerserve.kv.errors import InvalidInput  # noqa: E402
from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.units import MIB  # noqa: E402
from ownerserve.node.retention.record_value import SessionValue  # noqa: E402
from ownerserve.node.storage.limits import StoreLimits  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from ownerserve.store.disk.tier import DiskTier  # noqa: E402
from ownerserve.store.format.model import ArtifactKind  # noqa: E402
from ownerserve.store.index.reader import IndexEntry  # noqa: E402
from tests.support.hf.engine_rig import Later, Rig, request, text  # noqa: E402
from tests.support.hf.fleet_rig import ServedWorker  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine


def kept_by(store: Path, checkpoints: str, *, turns: int = 2) -> list[IndexEntry]:
    """What lies in the store after a session's turns on a worker with that policy."""
    node = NodeSettings(spill_after_s=0.0)
    options = WorkerOptions(model="tiny-v4", store=store, node=node, checkpoints=checkpoints)
    rig = Rig(max_running=2, options=options)

    async def scenario() -> None:
        prompt = text(300)
        for turn in range(turns):
            [answer] = await rig.ask(request(f"t{turn}", prompt, new=8, session="s"))
            prompt += [*answer.tokens(), *text(60, seed=turn)]

    rig.play(scenario)
    tier = DiskTier(store, ManualClock(time.time()))
    entries = list(tier.core.index.walk())
    tier.close()
    return entries


def points(entries: list[IndexEntry]) -> set[int]:
    return {entry.meta.end_token for entry in entries if entry.meta.kind is ArtifactKind.POINT}


def test_the_policy_that_is_asked_for_says_which_point_state_is_stored(tmp_path: Path) -> None:
    """Where the turns of 300 and 368 tokens end, at every 64, at every boundary the engine passed
    with a chunk's end, or nowhere; range state is stored under each."""
    kept = {
        name: kept_by(tmp_path / name.replace(":", "-"), name)
        for name in ("turn-end", "periodic:64", "full", "zero")
    }
    assert points(kept["turn-end"]) >= {288, 304, 352}, "ends of prompts and of outputs"
    assert points(kept["periodic:64"]) >= {64, 128, 192, 256}
    assert not points(kept["periodic:64"]) - set(range(64, 400, 64))
    assert points(kept["full"]) >= points(kept["turn-end"]) | {64, 128, 192, 256}
    assert not points(kept["zero"])
    for entries in kept.values():
        assert max(e.meta.end_token for e in entries if e.meta.kind is ArtifactKind.RANGE) >= 368


@pytest.mark.parametrize("policy", ["periodic:512", "zero", "adaptive"])
def test_the_workers_flag_is_what_it_is_built_with(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    asked: list[WorkerOptions] = []

    def built(options: WorkerOptions) -> None:
        asked.append(options)
        raise InvalidInput("model", "is not loaded here", "go on")

    monkeypatch.setattr(build, "build_worker", built)
    CliRunner().invoke(cli, ["worker", "--port", "0", "--checkpoints", policy])
    CliRunner().invoke(cli, ["worker", "--port", "0"])
    assert [options.checkpoints for options in asked] == [policy, "turn-end"]


def test_records_bear_what_a_hit_without_them_costs(tmp_path: Path) -> None:
    """The store keeps by it: range state the more, the more stands behind it; point state where
    the session ended, and nothing for that of a turn which another one followed."""
    entries = kept_by(tmp_path, "turn-end")
    cells = [
        e for e in entries if e.meta.kind is ArtifactKind.RANGE and e.meta.component == "csa_main"
    ]
    costs = [e.restore_cost_ms for e in sorted(cells, key=lambda e: e.meta.first_token)]
    assert len(costs) == 3 and costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    by_end = {e.meta.end_token: e.restore_cost_ms for e in entries if e.meta.component == "swa"}
    assert max(by_end.values()) == by_end[max(by_end)]


def test_a_sessions_own_gaps_say_when_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back after 1 s each time: once that is known, the worker's timer leaves it alone
    for longer; 0.25 s is for those it knows nothing of."""
    clock = Later(monkeypatch)
    node = NodeSettings(hold_ms_per_s=0.01)
    rig = Rig(max_running=2, options=WorkerOptions(model="tiny-v4", store=tmp_path, node=node))
    assert rig.node is not None
    counts: Counter[str] = rig.node.state.idle_spills.counts

    async def passes(seconds: float) -> None:
        clock.by_s += seconds
        for _ in range(5):  # the thread is woken, and looks
            await rig.engine.status(10.0)
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        prompt, copied = text(300), list[int]()
        for turn in range(8):
            [answer] = await rig.ask(request(f"t{turn}", prompt, new=8, session="s"))
            prompt += [*answer.tokens(), *text(40, seed=turn)]
            before = counts["kept"]
            await passes(0.8)
            copied.append(counts["kept"] - before)
            clock.by_s += 0.2
        assert copied[0] > 0, "nothing is known of it: 0.25 s"
        assert copied[-1] == 0, "it is back before a copy pays"
        await passes(400.0)
        assert counts["kept"] > sum(copied), "it has not come back"

    rig.play(scenario)


def test_what_a_fork_stands_on_is_kept_although_a_load_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionValue, "is_low", True)
    node = NodeSettings(spill_after_s=0.0)
    rig = Rig(max_running=2, options=WorkerOptions(model="tiny-v4", store=tmp_path, node=node))
    assert rig.node is not None
    counts: Counter[str] = rig.node.state.idle_spills.counts

    async def scenario() -> None:
        prompt = text(300)
        await rig.ask(request("one", prompt, new=4, session="parent"))
        while not counts["low_utility"]:
            await rig.engine.status(10.0)
        assert not counts["kept"]
        fork = request("two", [*prompt, 40], new=4, session="fork")
        await rig.ask(msgspec.structs.replace(fork, parent=SessionId("parent")))
        await rig.ask(request("three", [*prompt, 41], new=4, session="parent"))
        async with asyncio.timeout(20):
            while not counts["kept"]:
                await rig.engine.status(10.0)

    rig.play(scenario)


def test_what_is_past_its_time_goes_while_the_worker_serves(tmp_path: Path) -> None:
    options = WorkerOptions(
        model="tiny-v4",
        store=tmp_path,
        node=NodeSettings(spill_after_s=0.0),
        kv_bytes=8 * MIB,
        max_running=2,
        store_limits=StoreLimits(range_ttl_s=0.3, point_ttl_s=0.3, upkeep_s=0.1),
    )
    served = ServedWorker(options)
    try:
        body = {"prompt": text(300), "max_tokens": 2}
        answer = served.http.post("/v1/completions", json=body, headers={"x-session-id": "s"})
        assert answer.status_code == 200
        until(lambda: served.metric("ownerserve_spill_records_total") > 0)
        until(lambda: served.metric('ownerserve_store_upkeep_total{step="expired"') > 0)
        assert served.metric('ownerserve_store_upkeep_total{step="passes"') > 1
    finally:
        served.close()
