"""The real clock, for runtimes: Unix time, since records outlive the process that wrote them."""

from __future__ import annotations

import time


class WallClock:
    """Seconds since 1970. May step with the system's; a store only ages records by it."""

    def now(self) -> float:
        return time.time()
