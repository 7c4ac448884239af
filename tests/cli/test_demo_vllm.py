"""`ownerserve demo --engine vllm`: real vLLM servers, of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


def demo(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ownerserve.cli.main", "demo", "--engine", "vllm"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s)


def test_a_python_without_vllm_gets_one_clear_line() -> None:
    run = demo("--vllm-python", sys.executable, timeout_s=60)
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: --vllm-python: ")
    assert "ownerserve doctor vllm" in line


@pytest.mark.vllm
@pytest.mark.slow
def test_answers_are_vllms_own_and_a_killed_workers_session_goes_on(tmp_path: Path) -> None:
    if not VLLM_PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    target = tmp_path / "demo.json"
    size = ["--workers", "1", "--sessions", "4", "--turns", "4", "--context", "1500"]
    run = demo(*size, "--vllm-python", str(VLLM_PYTHON), "--json", str(target), timeout_s=900)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(target.read_bytes())
    [alone], [ours] = result["policies"]["vllm"], result["policies"]["ownerserve"]
    assert alone["errors"] == ours["errors"] == 0
    assert result["answers_equal"] is True
    assert ours["cached_token_share"] >= alone["cached_token_share"]
    crash = result["crash"]
    assert crash["cached_before"] == 0
    assert crash["cached_after"] >= 1024
    assert crash["max_logprob_difference"] < 1e-3
