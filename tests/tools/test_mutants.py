"""tools/mutants.py tells a fault that is noticed from one that is not, and refuses a stale list."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tools" / "mutants.py"))

ENTRY = """
[[mutant]]
name = "units"
file = "kv/units.py"
old = "GIB = 1 << 30"
new = "{new}"
breaks = "sizes"
tests = ["{tests}"]
"""


def lists(folder: Path, entries: str) -> list[object]:
    (folder / "suites.toml").write_text('[suites]\n"kv/" = ["a"]\n"kv/wire/" = ["b"]\n')
    (folder / "kv.toml").write_text(entries)
    found: list[object] = MUTANTS["read_lists"](folder)
    return found


def verdict(tmp_path: Path, *, new: str, seen: str) -> object:
    test = tmp_path / "test_sizes.py"
    test.write_text(f"from ownerserve.kv.units import GIB\n\ndef test_size():\n    assert {seen}\n")
    mutants = lists(tmp_path, ENTRY.format(new=new, tests=test))
    (one,) = MUTANTS["run_all"](mutants, lambda line: None)
    return one


@pytest.mark.slow
def test_a_fault_that_a_test_sees_is_killed_and_its_test_named(tmp_path: Path) -> None:
    one = verdict(tmp_path, new="GIB = 1 << 31", seen="GIB == 1 << 30")
    assert (one.outcome, one.is_good) == ("killed", True)
    assert "test_size" in one.by


@pytest.mark.slow
def test_a_fault_that_no_test_sees_survives_and_fails_the_run(tmp_path: Path) -> None:
    one = verdict(tmp_path, new="GIB = 1 << 31", seen="GIB > 1")
    assert (one.outcome, one.is_good) == ("survived", False)
    lines, found = MUTANTS["report"]([one])
    assert lines == ["killed 0 of 1 mutants", "! units (kv/units.py) survives: sizes"]
    assert found["killed"] == 0


@pytest.mark.slow
def test_a_fault_that_can_not_be_imported_proves_nothing(tmp_path: Path) -> None:
    one = verdict(tmp_path, new="GIB = (", seen="GIB == 1 << 30")
    assert (one.outcome, one.is_good) == ("not run", False)


@pytest.mark.slow
def test_suites_that_fail_without_a_mutant_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MUTANTS["BadList"], match="without a mutant"):
        verdict(tmp_path, new="GIB = 1 << 31", seen="False")


def test_text_that_moved_is_an_error_that_names_the_mutant(tmp_path: Path) -> None:
    entry = ENTRY.format(new="", tests=__file__)
    mutants = lists(tmp_path, entry.replace("1 << 30", "1 << 40"))
    (wrong,) = MUTANTS["check"](mutants, MUTANTS["PACKAGE"])
    assert wrong.startswith("units: its text stands 0 times in kv/units.py")


def test_what_is_no_python_is_an_error_that_names_the_mutant(tmp_path: Path) -> None:
    mutants = lists(tmp_path, ENTRY.format(new="GIB = (", tests=__file__))
    (wrong,) = MUTANTS["check"](mutants, MUTANTS["PACKAGE"])
    assert wrong.startswith("units: kv/units.py is no Python with it")


def test_a_test_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    mutants = lists(tmp_path, ENTRY.format(new="", tests=f"{__file__}::test_of_yesterday"))
    (wrong,) = MUTANTS["check"](mutants, MUTANTS["PACKAGE"])
    assert wrong.startswith(f"{__file__}::test_of_yesterday: there is no such test")


def test_most_must_be_noticed(tmp_path: Path) -> None:
    entry = ENTRY.format(new="", tests=__file__)
    mutants = lists(tmp_path, entry + 'survives = "nobody asks"\n')
    assert MUTANTS["check"](mutants, MUTANTS["PACKAGE"]) == [
        "1 of 1 survive: 90% must be noticed",
    ]


@pytest.mark.parametrize("wrong", ["old", "speed", "name"])
def test_an_entry_that_lacks_something_or_comes_twice_is_refused(
    tmp_path: Path, wrong: str
) -> None:
    whole = ENTRY.format(new="", tests="")
    entries = {
        "old": "\n".join(line for line in whole.splitlines() if not line.startswith("old")),
        "speed": whole + "speed = 1\n",
        "name": whole + whole,
    }
    with pytest.raises(MUTANTS["BadList"], match="units"):
        lists(tmp_path, entries[wrong])


def test_a_file_goes_by_the_longest_path_of_the_table() -> None:
    suites = {"kv/": ["a"], "kv/wire/": ["b"]}
    assert MUTANTS["suite_of"]("kv/wire/rpc.py", suites) == ("b",)
    assert MUTANTS["suite_of"]("kv/ids.py", suites) == ("a",)
    with pytest.raises(MUTANTS["BadList"], match="no suite"):
        MUTANTS["suite_of"]("node/state.py", suites)


def test_ten_tenths_in_a_row_have_every_mutant_once() -> None:
    every = list(range(157))
    found = [one for number in range(33, 43) for one in MUTANTS["tenth_of"](every, number)]
    assert sorted(found) == every


def test_the_lists_of_this_repository_are_in_place() -> None:
    mutants = MUTANTS["read_lists"](MUTANTS["LISTS"])
    assert MUTANTS["check"](mutants, MUTANTS["PACKAGE"]) == []
