"""`ownerserve plan`: what it prints and what programs may rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.plan import command
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium


def run(*args: str) -> str:
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document(*args: str) -> dict[str, object]:
    found = json.loads(run(*args, "--json", "-"))
    assert isinstance(found, dict)
    return found


def test_a_restore_is_priced_and_explained() -> None:
    output = run("deepseek-v4-pro", "--context", "110K", "--new", "758", "--gpus", "8")
    assert "roofline of 8 x H200 (data sheet, not measured)" in output
    assert "taken: load_global + load_point + prefill from 112,640" in output
    assert "not offered: replay: approximate_not_asked" in output


def test_a_branch_without_point_state_is_replayed_on_hf_and_prefilled_on_vllm() -> None:
    branch = ("deepseek-v4-pro", "--context", "110K", "--shared", "90K", "--state-tier", "none")
    ours = document(*branch)
    assert ours["schema"] == "ownerserve.plan/1"
    chosen = ours["chosen"]
    assert isinstance(chosen, dict)
    assert chosen["computed_tokens"] == 7747 + 758
    assert [s["action"] for s in chosen["steps"]] == ["load_global", "replay", "prefill"]
    theirs = document(*branch, "--engine", "vllm")["chosen"]
    assert isinstance(theirs, dict)
    assert [s["action"] for s in theirs["steps"]] == ["prefill"]


def test_terms_add_up_in_the_document() -> None:
    found = document("gpt-oss-120b", "--context", "30K", "--checkpoint-every", "4K")
    alternatives = found["alternatives"]
    assert isinstance(alternatives, list)
    for way in alternatives:
        t = way["terms"]
        parts = t["queue_ms"] + t["load_ms"] + t["recompute_ms"] + t["stall_ms"]
        assert way["ttft_ms"] == pytest.approx(parts)
    assert found["sources"] == dict.fromkeys(
        ("prefill", "replay", "host", "disk", "peer", "remote"), "default"
    )


def test_measured_costs_replace_the_defaults(tmp_path: Path) -> None:
    media = {Tier.DISK: Medium(0.1, 1e3)}  # a disk so slow that nothing is worth loading
    model = CostModel(Defaults("worker-3", Coefficients(1.0, 0.001, 0.0), media))
    path = tmp_path / "costs.json"
    path.write_bytes(model.dump())
    chosen = document("llama-3.1-8b", "--costs", str(path))["chosen"]
    assert isinstance(chosen, dict)
    assert chosen["position"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("llama-3.1-8b", "--gpu", "H9000"), "--gpu"),
        (("llama-3.1-8b", "--context", "many"), "--context"),
        (("llama-3.1-8b", "--new", "0"), "--new"),
        (("llama-3.1-8b", "--context", "1K", "--shared", "2K"), "--shared"),
        (("llama-3.1-8b", "--active-params", "3.3X"), "--active-params"),
    ],
)
def test_bad_input_names_the_flag(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CliRunner().invoke(command, args, catch_exceptions=False)
