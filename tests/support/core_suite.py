"""A pytest plug-in that makes a run the core suite and keeps it so: cheap, without an engine.

    pytest -p tests.support.core_suite --cpu-loops N

CPU seconds differ from machine to machine and with what runs beside, so the limit is in loops: how
long this very process takes for a fixed loop in plain Python, taken again and again between the
tests. There are two, and the dearer one counts: a slow core slows the one that counts numbers, who
else uses the memory the one that makes objects. The run fails when its CPU time, that of imports
and of child processes too, is above N loops, and names the tests that took most; or when anything
has imported one of `ENGINES`. Compiling files, which only the first run does where Python may keep
them, is not counted. Properties are tried on a third of their examples.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from tests.support import examples

COUNTED, MADE = 600_000, 120_000
"""Passes of a loop that counts and of one that makes objects: each about 0.075 s of CPU."""
PARTS = 8
"""A loop is run in so many, one at a time."""
EVERY = 48
"""Tests between two parts."""
NAMED = 10
ENGINES = ("torch", "transformers", "vllm")

examples.divisor = 3
settings.register_profile("core", max_examples=100 // examples.divisor)
settings.load_profile("core")

_spent_s: Counter[str] = Counter()
_counting_s: list[float] = []
_making_s: list[float] = []
_compiling_s: list[float] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-loops", type=float, help="most CPU time of the whole run, in loops")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if len(_spent_s) % EVERY == 0:
        run_part()
    began_s = cpu_s()
    found = yield
    _spent_s[item.nodeid] = cpu_s() - began_s
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    limit = session.config.getoption("--cpu-loops")
    run_part()
    one_s = PARTS * max(sum(_counting_s), sum(_making_s)) / len(_counting_s)
    spent_s = cpu_s() - sum(_counting_s) - sum(_making_s) - sum(_compiling_s)
    loops = spent_s / one_s
    is_over = limit is not None and loops > limit
    lines = [
        f"{spent_s:.1f} s of CPU: {loops:.0f} loops of {one_s * 1e3:.0f} ms, {limit} allowed"
        f" (and {sum(_compiling_s):.1f} s for compiling files)"
    ]
    if is_over or limit is None:
        lines += [f"{test_s:6.2f} s  {name}" for name, test_s in _spent_s.most_common(NAMED)]
    imported = [name for name in ENGINES if name in sys.modules]
    lines += [f"{name} was imported" for name in imported]
    print("", *lines, sep="\n")
    if (is_over or imported) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in use)


def run_part() -> None:
    """Run a part of each loop and note its CPU seconds: calls, small numbers, a dict, a list, as
    decisions are made of; and objects all over the memory, as tests make them."""
    began_s = time.process_time()
    counts: dict[int, int] = {}
    kept: list[int] = []
    for number in range(COUNTED // PARTS):
        key = hash((number, number & 7)) & 255
        counts[key] = counts.get(key, 0) + 1
        if not key:
            kept.append(number)
    _counting_s.append(time.process_time() - began_s)
    began_s = time.process_time()
    made: dict[int, tuple[int, str]] = {}
    for number in range(MADE // PARTS):
        key = number * 2_654_435_761 % 60_000
        made[key] = (number, str(key))
        again = made.get(hash((number, key)) % 60_000)
        if again is not None and again[0] == number:
            del made[key]
    _making_s.append(time.process_time() - began_s)


def _timed(compiling: Callable[..., Any]) -> Callable[..., Any]:
    """`compiling`, its CPU seconds counted apart."""

    @wraps(compiling)
    def timed(*arguments: Any, **options: Any) -> Any:
        began_s = time.process_time()
        try:
            return compiling(*arguments, **options)
        finally:
            _compiling_s.append(time.process_time() - began_s)

    return timed


# pytest and Python have no hook for it.
SourceFileLoader.source_to_code = _timed(SourceFileLoader.source_to_code)  # type: ignore[method-assign]
SourceFileLoader.set_data = _timed(SourceFileLoader.set_data)  # type: ignore[method-assign]
rewrite._rewrite_test = _timed(rewrite._rewrite_test)  # noqa: SLF001
rewrite._write_pyc = _timed(rewrite._write_pyc)  # noqa: SLF001
