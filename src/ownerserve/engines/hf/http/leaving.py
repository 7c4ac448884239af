"""How a worker leaves: it says so, serves what is here, lends its state so that its sessions go on
elsewhere with it, and ends.

    SIGTERM ─> leaving (stated: gateways send no new turn, and bring its sessions' state elsewhere)
                 │ heard for NOTICE_S, and nothing runs, waits, is read, or stands here ─> ended
                 │ the timeout ─────────────────────────────────────────────────────────> ended
                 `─ a second signal ────────────────────────────────────────────────────> ended

What is idle still then is put away as by any end (`Restoring.close`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

LOOK_S = 0.1
NOTICE_S = 2.0
"""So long gateways have to hear of it, who ask each second."""


class WorkerLeave:
    """A `WorkerLeave` is how one worker ends. `begin` has the directory asked whose the sessions
    here are, `is_needed` tells whether anything here still is."""

    def __init__(
        self,
        timeout_s: float,
        begin: Callable[[], Awaitable[None]],
        is_needed: Callable[[], Awaitable[bool]],
    ) -> None:
        self.timeout_s = timeout_s
        self.is_under_way = False
        """Stated to gateways."""
        self._begin = begin
        self._is_needed = is_needed

    async def end(self) -> None:
        """Say that the worker leaves, and return when it may."""
        self.is_under_way = True
        with suppress(RuntimeError):  # the engine has ended by itself
            await self._begin()
            await self._until_free()

    async def _until_free(self) -> None:
        began_s = time.monotonic()
        until_s = began_s + self.timeout_s
        while (now := time.monotonic()) < until_s:
            if now - began_s >= NOTICE_S and not await self._is_needed():
                return
            await asyncio.sleep(LOOK_S)
