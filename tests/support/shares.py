"""A pytest plug-in for a share of a suite in which every test still has its part.

    pytest -p tests.support.shares --share 7/3

Of each test's cases (its parameters) one in 3 runs, the 7th, 10th, ... as they are counted from
nought and round and round; of fewer than 3 cases one. So three numbers in a row have all cases, and
each of them has every test: what CI runs, another share with each commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", metavar="NUMBER/PARTS", help="cases to run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of all cases, before other options (`-m`, `--last-failed`) take theirs: so a
    case is in a share or not, whatever they leave."""
    number, parts = read_share(config.getoption("--share"))
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {item for of_one in cases.values() for item in share(of_one, number, parts)}
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def read_share(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise pytest.UsageError(f"--share {text}: no share; give two numbers, such as 7/3")
    return int(number), int(parts)


def share(cases: Sequence[Case], number: int, parts: int) -> Sequence[Case]:
    """One in `parts` of a test's cases, at least one."""
    parts = min(parts, len(cases))
    return cases[number % parts :: parts]
