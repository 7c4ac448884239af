"""The `/ownerserve/*` routes as vLLM's own plug-in loader sees them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.wire.status import read_status
from tests.support.children import importing
from tests.support.vllm.installed import distribution

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


def child(folder: Path, allowed: str | None) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    environment = importing(distribution(folder), OMP_NUM_THREADS="1")
    environment.pop("VLLM_PLUGINS", None)
    if allowed is not None:
        environment["VLLM_PLUGINS"] = allowed
    run = subprocess.run(
        [PYTHON, "-m", "tests.support.vllm_parts.plugin_child", folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


def test_the_routes_answer_for_the_engine_core(tmp_path: Path) -> None:
    report = child(tmp_path, "ownerserve")
    assert report["plugins"] == ["ownerserve"]
    status, body = report["no connector"]
    assert (status, "--kv-transfer-config" in body["error"]) == (503, True)
    assert report["no engine"][0] == 503
    status, told = report["status"]
    assert status == 200
    read = read_status(json.dumps(told).encode())
    assert (read.problems, read.status is not None) == ((), True)
    unit, load, profile = told["unit"], told["load"], told["profile"]
    assert (unit["worker"], unit["rank"]) == ("w1", 0)
    assert told["ranks"] == {"data_parallel": 1, "pipeline": 2, "tensor": 4}
    assert load["pending_prefill_tokens"] == 250
    assert (load["running_sequences"], load["waiting_sequences"]) == (1, 1)
    memory = [load[f"kv_bytes_{part}"] for part in ("free", "evictable", "total")]
    assert memory == [3000, 4000, 8000]
    assert profile["models"] == ["m"]
    assert profile["actions"] == ["colocated_prefill", "decode_continuation", "tail_recompute"]
    assert (profile["kv_bytes_per_token"], profile["kv_bytes_per_sequence"]) == (10, 70)
    assert (profile["speed"]["step_ms"], profile["tiers"][0]["bytes_per_ms"]) == (3, 5)
    assert profile["rpc"].startswith("tcp://127.0.0.1:")
    for case in ("turn", "nobody's turn"):
        status, line, _ = report[case]
        assert (status, line["unit"][2], "owner" in line) == (200, unit["incarnation"], False)
        assert line["load"]["pending_prefill_tokens"] == 250
    name, parent, group = ("5" * 32, "6" * 32, "7" * 32)
    its_answer = [name, None, ""]  # by then the session may be over: nothing is told of it again
    health = [None, None, ""]
    assert report["heard"] == [its_answer, health, [name, parent, group], its_answer]
    assert report["health"]["unit"] == report["turn"][1]["unit"]
    for case in ("turn without a core", "turn, silent core", "turn, core gone"):
        status, line, took_s = report[case]
        assert (status, line) == (200, None) and took_s < 60, case
    for case in ("turn, bad line", "turn of no gateway"):
        assert report[case][:2] == [200, None], case
    status, page = report["inventory"]
    assert (status, page["incarnation"], page["last"]) == (200, unit["incarnation"], 7)
    assert page["floor"] == 0 and report["news"][1]["floor"] == 30, "so long news is waited for"
    assert report["no number"][0] == 400
    assert report["admit"] == [200, {"type": "admit", "ahead_prefill_tokens": 250}]
    for case, reason in {
        "too long": "too_long",
        "queue full": "queue_full",
    }.items():
        assert report[case] == [429, {"type": "reject", "reason": reason}]
    assert report["malformed"][0] == 400
    assert [status for status, _ in report["absurd"]] == [400] * 3
    assert all("tokens" in told["error"] for _, told in report["absurd"])
    assert report["release"][0] == 200
    assert report["released"] == [["s"], []]
    assert report["idle"][1]["load"]["pending_prefill_tokens"] == 0
    assert report["idle"][1]["load"]["running_sequences"] == 0
    assert report["closed"][0] == 503


def test_vllm_loads_it_only_when_it_is_allowed(tmp_path: Path) -> None:
    assert child(tmp_path, None)["plugins"] == []
