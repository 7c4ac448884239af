"""Waiting for what other threads, processes and tasks do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 300.0
"""Longer than anything takes on a loaded machine: with twenty others at work a worker that imports
torch took more than 60 s to begin."""
LOOK_S = 0.01


def until(holds: Callable[[], object], *, within_s: float = WAIT_S, what: str = "it") -> None:
    """Returns when `holds()` is true. Raises AssertionError when it never is in `within_s`."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {within_s} s"
        time.sleep(LOOK_S)


async def until_async(
    holds: Callable[[], object], *, within_s: float = WAIT_S, what: str = "it"
) -> None:
    """`until` for a task beside others of its loop."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {within_s} s"
        await asyncio.sleep(LOOK_S)
