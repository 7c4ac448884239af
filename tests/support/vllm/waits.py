"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 30.0


def until(holds: Callable[[], object]) -> None:
    """Fails when it does not hold in time."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.05)
