"""Time is an argument. Decision code is handed `now`; only runtimes read a real clock."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A clock returns the seconds since an arbitrary origin; it never goes back."""

    def now(self) -> float:
        """Return the seconds."""
        ...


class ManualClock:
    """A manual clock stands still until a test or the simulator moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time that was set, in seconds."""
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move forward by `by_s` seconds; raises ValueError when negative."""
        if by_s < 0:
            raise ValueError(f"a clock can't go back by {-by_s} s")
        self._now_s += by_s
