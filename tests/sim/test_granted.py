"""What simulated engines are granted: what real ones state, or all that is designed."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction
from ownerserve.plan.inputs import ENGINES
from ownerserve.router.worker import EVERY_ENGINE
from ownerserve.sim.config.granted import granted
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from tests.support.sim.fleet_driver import agents, ready, run, setup

TRACE = agents()
MOVES = {"hot_ms": 0.0, "cool_s": 0.0}


def test_the_sets_are_what_engines_state_and_ideal_names_what_none_does() -> None:
    for name in ("hf", "vllm"):
        told = granted(name)  # type: ignore[arg-type]
        assert told.planner is ENGINES[name] and told.not_built == ()
        assert told.actions >= EVERY_ENGINE
        assert PlacementAction.STATE_MIGRATION not in told.actions
    ideal = granted("ideal")
    assert set(ideal.not_built) == {
        "artifact_fetch", "remote_prefill", "state_migration", "overlap=layerwise",
    }  # fmt: skip


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


def test_what_is_granted_is_part_of_what_is_told() -> None:
    told = granted("ideal").told()
    assert told["planner"] == msgspec.to_builtins(ENGINES["ideal"])
    assert "state_migration" in told["actions"] and "state_migration" in told["modelled_not_built"]
    assert "modelled, not yet built: " in granted("ideal").words()
    assert "not yet built" not in granted("hf").words()
