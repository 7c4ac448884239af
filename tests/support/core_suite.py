"""A pytest plug-in that makes a run the core suite and keeps it so: cheap, without an engine.

    pytest -p tests.support.core_suite --cpu-loops N

CPU seconds differ from machine to machine, so the limit is in loops: how long this very process
takes for a fixed loop in plain Python. The run fails when all its CPU time, that of imports and of
child processes too, is above N loops, and names the tests that took most; or when anything has
imported one of `ENGINES`. Properties are tried on a third of their examples.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support import examples

PASSES = 400_000
"""Of the loop: about 0.08 s of CPU."""
RUNS = 5
NAMED = 10
ENGINES = ("torch", "transformers", "vllm")

examples.divisor = 3

_spent_s: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-loops", type=float, help="most CPU time of the whole run, in loops")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began_s = cpu_s()
    found = yield
    _spent_s[item.nodeid] = cpu_s() - began_s
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    limit = session.config.getoption("--cpu-loops")
    spent_s, one_s = cpu_s(), min(loop_s() for _ in range(RUNS))
    loops = spent_s / one_s
    is_over = limit is not None and loops > limit
    lines = [f"{spent_s:.1f} s of CPU: {loops:.0f} loops of {one_s * 1e3:.0f} ms, {limit} allowed"]
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


def loop_s() -> float:
    """CPU seconds of the loop: calls, small numbers, a dict, a list, as decisions are made of."""
    began_s = time.process_time()
    counts: dict[int, int] = {}
    kept: list[int] = []
    for number in range(PASSES):
        key = hash((number, number & 7)) & 255
        counts[key] = counts.get(key, 0) + 1
        if not key:
            kept.append(number)
    return time.process_time() - began_s
