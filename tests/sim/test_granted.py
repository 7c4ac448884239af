"""What simulated engines are granted: what real ones state, or all that is designed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.node.runtime.stating import actions_of
from ownerserve.plan.inputs import ENGINES
from ownerserve.plan.window_replay import why_no_window_replay
from ownerserve.router.worker import EVERY_ACTION, EVERY_ENGINE
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.granted import FETCHES, OF_PEERS, granted
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from tests.support.sim.fleet_driver import agents, ready, run, setup

TRACE = agents()
MOVES = {"hot_ms": 0.0, "cool_s": 0.0}


def test_the_sets_are_what_engines_state_and_ideal_names_what_none_does() -> None:
    for name in ("hf", "vllm", "vllm-replay"):
        told = granted(name)  # type: ignore[arg-type]
        assert told.planner is ENGINES[name] and told.not_built == ()
        assert told.actions >= EVERY_ENGINE
        assert told.actions & OF_PEERS == (OF_PEERS if name == "hf" else FETCHES)
        alone = granted(name, tiers=frozenset())  # type: ignore[arg-type]
        assert alone.actions == EVERY_ENGINE, "without a tier a worker of ours has no node"
    assert granted("hf").actions == set(actions_of((Tier.HOST, Tier.PEER)))
    ideal = granted("ideal")
    assert set(ideal.not_built) == {"overlap=layerwise"}
    assert ideal.actions == EVERY_ACTION


@pytest.mark.parametrize(("abilities", "moves"), [("ideal", True), ("hf", False), ("vllm", False)])
def test_a_session_moves_only_where_that_is_granted(abilities: str, *, moves: bool) -> None:
    fleet = run(ready(TRACE, setup("ear", abilities=abilities, **MOVES)))
    assert bool(fleet.counters.migrations) is moves


def test_a_policy_that_splits_needs_workers_that_do() -> None:
    with pytest.raises(InvalidInput, match=r"remote_prefill.*--engine-abilities ideal"):
        setup("static_pd", abilities="hf")


def test_what_a_node_may_plan_is_what_its_engine_is_granted() -> None:
    """Window state that nobody kept is replayed on hf; vLLM computes the prompt."""
    trace = generate("coding-agent", Options(sessions=6, max_input_tokens=40_000))
    tiers = Tiers(host_bytes=2 * 10**9, disk_bytes=400 * 10**9, checkpoints="zero")
    kept = {
        name: simulate(
            trace,
            SimSetup(
                policy="sticky", workers=1, pace="deepseek-v4-flash@h200", kv_bytes=10**9,
                running=4, tiers=tiers, abilities=name, shape=WorkloadShape(mode=Capped(3)),
            ),
        ).metrics
        for name in ("hf", "vllm")
    }  # fmt: skip
    assert kept["hf"]["restored_tokens"] > 0 == kept["vllm"]["restored_tokens"]  # type: ignore[operator]
    assert kept["hf"]["computed_tokens"] < kept["vllm"]["computed_tokens"]  # type: ignore[operator]


GPT_OSS = build_spec(read_config(find_config("gpt-oss-120b")))
REPLAY_TOKENS = 18 * 127


def of_gpt_oss(abilities: str, **changes: Any) -> dict[str, Any]:
    """Metrics of a worker whose model has gpt-oss's windows and Qwen3-30B-A3B's pace, and whose
    store keeps no window."""
    trace = generate("coding-agent", Options(sessions=6, max_input_tokens=40_000))
    tiers = Tiers(host_bytes=20 * 10**9, disk_bytes=400 * 10**9, checkpoints="zero")
    told = SimSetup(
        policy="sticky", workers=1, pace="qwen3-30b-a3b@h200", kv_bytes=2 * 10**9,
        running=4, tiers=tiers, abilities=abilities, shape=WorkloadShape(mode=Capped(3)), **changes,
    )  # type: ignore[arg-type] # fmt: skip
    return simulate(trace, told, parts=BaselineParts(spec=lambda _: GPT_OSS)).metrics


@pytest.mark.slow
def test_vllm_under_our_scheduler_replays_windows_of_paged_attention() -> None:
    """As on hf, a replay is R tokens before what full attention has kept."""
    kept = {name: of_gpt_oss(name) for name in ("hf", "vllm", "vllm-replay")}
    assert kept["vllm-replay"]["restored_tokens"] > 0 == kept["vllm"]["restored_tokens"]
    assert kept["vllm-replay"]["computed_tokens"] < kept["vllm"]["computed_tokens"]
    assert kept["vllm-replay"]["restore"]["recompute_ms"] > 0
    assert kept["hf"]["computed_tokens"] <= kept["vllm-replay"]["computed_tokens"]


def test_what_vllm_can_not_replay_is_refused_with_the_mend() -> None:
    with pytest.raises(InvalidInput, match=r"dense: it has no window.*--engine-abilities vllm"):
        run(ready(TRACE, setup("ear", abilities="vllm-replay")))
    with pytest.raises(InvalidInput, match=f"{REPLAY_TOKENS} tokens is longer than a step of 2048"):
        of_gpt_oss("vllm-replay", step_tokens=2048)
    v4 = build_spec(read_config(find_config("deepseek-v4-flash")))
    why = why_no_window_replay(v4, block_tokens=64, step_tokens=8192)
    assert why is not None and "csa_main" in why
    chunked = build_spec(read_config(find_config("llama-4-scout")))
    why = why_no_window_replay(chunked, block_tokens=64, step_tokens=1 << 20)
    assert why == "its layers are of chunked_attention"
    assert why_no_window_replay(GPT_OSS, block_tokens=64, step_tokens=8192) is None


def test_what_is_granted_is_part_of_what_is_told() -> None:
    told = granted("ideal").told()
    assert told["planner"] == msgspec.to_builtins(ENGINES["ideal"])
    assert "state_migration" in told["actions"]
    assert told["modelled_not_built"] == ["overlap=layerwise"]
    assert "modelled, not yet built: " in granted("ideal").words()
    assert "not yet built" not in granted("hf").words()
