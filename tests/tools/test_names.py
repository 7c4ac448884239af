"""tools/names.py notices a name with two meanings, a renamed import, and a wrong glossary."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = runpy.run_path(str(ROOT / "tools" / "names.py"))

GLOSSARY = """
| term | means | in the code |
|---|---|---|
| owner | who may change it | `OwnerState`, `directory/owner.Lease` |
| owner | once more | docs/directory.md |

| theirs | whose | here | note |
|---|---|---|---|
| radix cache | SGLang | `Tree` | |
"""


def trees(**sources: str) -> list[tuple[str, ast.Module]]:
    return [(path.replace("__", "/"), ast.parse(text)) for path, text in sources.items()]


def test_a_class_name_stands_once_and_an_exception_needs_two_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = NAMES["class_definitions"](
        trees(cache__a="class Span: ...", store__b="class Span: ...\nclass _Span: ...")
    )
    assert found == {"Span": ["cache/a:1", "store/b:1"]}
    assert list(NAMES["twice"](found)) == ["class Span is defined 2 times: cache/a:1, store/b:1"]
    monkeypatch.setitem(NAMES["TWICE"], "Span", "excepted here")
    assert not list(NAMES["twice"](found))
    assert list(NAMES["twice"]({"Span": ["cache/a:1", "cache/b:1"]}))


def test_an_import_of_ours_keeps_its_name() -> None:
    source = "from ownerserve.kv import ids as other\nimport numpy as np\nfrom ownerserve import kv"
    assert list(NAMES["renamed_imports"](trees(a=source))) == [("a ids", "other")]


def test_a_retired_word_is_found_in_every_kind_of_name() -> None:
    source = "class OpenErrand: ...\ndef f(errand_id): self.last_errand = errands = 1"
    found = NAMES["retired_words"](trees(a=source))
    assert found["errand"] == ["a OpenErrand", "a errand_id", "a last_errand"]


def test_the_glossary_names_classes_that_exist_and_a_term_once() -> None:
    problems = list(NAMES["glossary_problems"](GLOSSARY, {"OwnerState": ["a:1"]}))
    assert problems == [
        "glossary: owner has 2 rows",
        "glossary: owner: there is no class Lease",
    ]


def test_a_docstring_that_opens_badly_is_found_on_modules_functions_and_attributes() -> None:
    source = (
        '"""Of all."""\nX = 1\n"""Its unit is ms."""\ndef f():\n    """Who asks."""\n    "As f."'
    )
    found = [text.where for text in NAMES["docstrings"](trees(a=source)) if text.opens_badly]
    assert found == ["a:1", "a:5"]
