"""A share of a suite: every test has a part in it, and some in a row have all cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shares import read_share, share

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import pytest

def test_alone(): pass

class TestMany:
    @pytest.mark.parametrize("one", range(7))
    def test_many(self, one): pass

@pytest.mark.slow
@pytest.mark.parametrize("one", "ab")
def test_two(one): pass
"""


@given(st.integers(1, 40), st.integers(0, 1000), st.integers(1, 12))
def test_shares_in_a_row_have_all_cases_and_each_has_some(
    cases: int, first: int, parts: int
) -> None:
    every = range(cases)
    shares = [share(every, first + more, parts) for more in range(parts)]
    assert all(shares)
    assert {case for one in shares for case in one} == set(every)
    assert parts > cases or sum(map(len, shares)) == cases


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.support.shares", *options]
    command += [f"--rootdir={folder}", "-c", "/dev/null", "-p", "no:cacheprovider", str(folder)]
    told = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take 2 s to import
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_run_of_a_share(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--share", "4/3", "-W", "ignore")
    ran = {line.split(" ")[0].partition("::")[2] for line in said.splitlines() if "PASSED" in line}
    many = {f"TestMany::test_many[{one}]" for one in (1, 4)}
    assert ran == {"test_alone", "test_two[a]", *many}
    assert code == 0 and "6 deselected" in said


@pytest.mark.parametrize("text", ["3", "a/b", "1/0", "-1/3"])
def test_a_share_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="no share; give two numbers, such as 7/3"):
        read_share(text)
