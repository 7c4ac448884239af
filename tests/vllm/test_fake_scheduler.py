"""The fake scheduler's names, and the order of its calls, are the installed vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


def test_the_fake_has_no_name_that_vllm_has_not() -> None:
    if not PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    run = subprocess.run(
        [PYTHON, "-m", "tests.support.vllm_parts.fake_vllm.compared"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == []
