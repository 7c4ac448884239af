"""tools/closed.py notices who reaches into a closed package, or into another module's thing."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSED = runpy.run_path(str(ROOT / "tools" / "closed.py"))
MODULES = frozenset({"ownerserve.cache.hetero", "ownerserve.cache.tree.node"})


def reached(module: str, source: str) -> dict[str, str]:
    return dict(CLOSED["reached"](module, ast.parse(source), MODULES))


def private(source: str) -> dict[str, str]:
    return dict(CLOSED["private"]("ownerserve.node.state", ast.parse(source)))


def test_a_part_of_a_closed_package_is_imported_inside_it_alone() -> None:
    source = "from ownerserve.cache.tree.node import Node\nfrom ownerserve.cache.tree import node"
    assert list(reached("ownerserve.node.state", source)) == [
        "ownerserve.node.state: ownerserve.cache.tree.node"
    ]
    assert not reached("ownerserve.cache.pressure", source)


def test_what_is_open_may_be_imported_but_for_what_is_kept_for_tests() -> None:
    assert not reached("ownerserve.node.state", "from ownerserve.cache.hetero import HeteroCache")
    found = reached("ownerserve.node.state", "from ownerserve.cache.hetero import parts_of")
    assert list(found) == ["ownerserve.node.state: ownerserve.cache.hetero.parts_of"]


def test_a_private_member_is_its_own_modules() -> None:
    own = (
        "class A:\n    def __init__(self): self._x = 1\n    def same(self, other): return other._x"
    )
    assert not private(own)
    assert not private("def f(row): return row._replace(a=1)")
    assert list(private("def f(cache): return cache._tree")) == ["ownerserve.node.state: _tree"]


@pytest.mark.slow
def test_the_tree_as_it_stands_is_closed() -> None:
    assert CLOSED["main"]() == 0
