"""docs/node.md's table of deadlines: each row names tests, and the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """The table's rows as cells, without its head."""
    text = (ROOT / "docs" / "node.md").read_text()
    section = text.split("\n## Deadlines\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_deadline_names_tests_that_exist() -> None:
    assert len(rows()) >= 14
    for waits, *_, tested in rows():
        named = TEST.findall(tested)
        assert named, f"no test is named for: {waits}"
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no {test}"


def test_each_test_with_a_silent_one_in_these_files_is_named() -> None:
    """A test of a wait that no row tells of is a wait that the page does not know."""
    named = {pair for row in rows() for pair in TEST.findall(row[-1])}
    for path in sorted((ROOT / "tests").glob("*/test_silent_*.py")):
        file = path.relative_to(ROOT / "tests").as_posix()
        for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            assert (file, test) in named, f"{file}::{test}"
