"""Tests share code by importing `tests.support`, never by editing Python's path."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
EDIT = "sys" + ".path"


def test_no_test_edits_the_import_path() -> None:
    files = (ROOT / "tests").rglob("*.py")
    assert [str(path.relative_to(ROOT)) for path in files if EDIT in path.read_text()] == []
