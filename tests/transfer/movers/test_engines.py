"""Movers over engines that are not ours keep the contract of all movers, and nodes bring by them,
each over the real wheel in an environment of its own: it writes late, and only where nothing else
is. Between workers: tests/engines/hf/test_bringing_engines.py.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support.children import ROOT, importing
from tests.support.transfer.engines.environments import SETTINGS, packages_of

pytestmark = [pytest.mark.slow, pytest.mark.crash]


@pytest.mark.parametrize("engine", SETTINGS)
def test_its_mover_keeps_the_contract(engine: str) -> None:
    chosen = "slow or not slow" if os.environ.get("OWNERSERVE_LONG") else "not slow"
    assert passed(engine, "contract", chosen) > 30


@pytest.mark.parametrize("engine", SETTINGS)
def test_nodes_bring_by_it(engine: str) -> None:
    assert passed(engine, "nodes", "slow or not slow") == 2


def passed(engine: str, suite: str, chosen: str) -> int:
    """How many tests of the suite there are, all of which passed in the engine's environment."""
    if packages_of(engine) is None:
        pytest.skip(f"needs {engine}'s environment: make test-engines")
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    tests = f"tests/support/transfer/engines/{engine}_{suite}.py"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen, tests],
        env=importing(**SETTINGS[engine]), cwd=ROOT,
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    told = done.stdout[-5000:] + done.stderr[-1000:]
    assert done.returncode == 0, told
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and "skipped" not in done.stdout, told
    return int(found[1])
