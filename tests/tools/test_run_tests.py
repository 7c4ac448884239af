"""tools/run_tests.py forgives a test that fails once, and says so; it forgives nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"

GOOD = "def test_good():\n    pass\n"
BAD = "def test_bad_{n}():\n    assert False\n"
FLAKY = """
def test_flaky_{n}():
    seen = Path("seen_{n}")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
FAILS_THEN_SKIPS = """
def test_vanishes():
    if Path("seen").exists():
        pytest.skip("what it needs is gone")
    Path("seen").touch()
    assert False
"""


def run(folder: Path, *tests: str, name: str = "test_these.py") -> subprocess.CompletedProcess[str]:
    """What the tool says of these tests."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / name).write_text("\n".join(["from pathlib import Path\nimport pytest", *tests]))
    command = [sys.executable, str(TOOL), "-q", "-k", "not unasked"]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second to import
    return subprocess.run(
        command, cwd=folder, env=alone, text=True, capture_output=True, check=False
    )


def test_a_run_without_failures_passes_and_prints_its_slowest(tmp_path: Path) -> None:
    told = run(tmp_path, GOOD)
    assert told.returncode == 0
    assert "slowest 20 durations" in told.stdout
    assert "!!! failed" not in told.stdout


def test_what_failed_once_and_passed_alone_is_named_and_passes(tmp_path: Path) -> None:
    told = run(tmp_path, GOOD, *(FLAKY.format(n=n) for n in range(3)))
    assert told.returncode == 0
    last = told.stdout.splitlines()[-1]
    names = ", ".join(f"test_these.py::test_flaky_{n}" for n in range(3))
    assert last == f"!!! failed once, passed alone: {names}"
    assert told.stdout.splitlines()[-2].startswith("3 passed")  # they alone


def test_more_than_three_failures_are_no_chance(tmp_path: Path) -> None:
    told = run(tmp_path, GOOD, *(FLAKY.format(n=n) for n in range(4)))
    assert told.returncode == 1
    assert "!!! failed" not in told.stdout


@pytest.mark.parametrize("second", [BAD.format(n=1), FAILS_THEN_SKIPS])
def test_what_fails_twice_or_does_not_run_again_fails(tmp_path: Path, second: str) -> None:
    told = run(tmp_path, FLAKY.format(n=0), second)
    assert told.returncode == 1
    assert told.stdout.splitlines()[-1].startswith("!!! failed twice")


def test_a_failure_of_an_earlier_run_is_not_run_for_this_one(tmp_path: Path) -> None:
    assert run(tmp_path, BAD.format(n=0), name="test_before.py").returncode == 1
    (tmp_path / "test_before.py").write_text(GOOD)
    told = run(tmp_path, FLAKY.format(n=7))
    assert told.returncode == 0
    assert told.stdout.splitlines()[-1].endswith(": test_these.py::test_flaky_7")


def test_a_file_that_can_not_be_collected_fails_at_once(tmp_path: Path) -> None:
    told = run(tmp_path, "import nothing_of_this_name")
    assert told.returncode == 2
    assert "!!! failed" not in told.stdout
