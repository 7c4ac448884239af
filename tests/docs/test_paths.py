"""Every path and class that the pages about the code's shape name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ownerserve"
PAGES = ("architecture.md", "where-to-change.md", "glossary.md")
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+\.\w+|Makefile)`")
CLASS = re.compile(r"`([A-Z][a-z]\w*[A-Z]\w*)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    named = set(PATH.findall((ROOT / "docs" / page).read_text()))
    assert named
    missing = {path for path in named if not any((at / path).exists() for at in (SOURCE, ROOT))}
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_class_exists(page: str) -> None:
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    defined = set(re.findall(r"^ *class (\w+)|^(\w+) *(?::[^=]+)?= ", source, re.MULTILINE))
    names = {name for pair in defined for name in pair if name}
    assert not set(CLASS.findall((ROOT / "docs" / page).read_text())) - names
