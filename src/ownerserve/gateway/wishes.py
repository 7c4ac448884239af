"""This module reads what operators wish: that a worker hold a read-only copy of what a session ends
in (`ownerserve directory replicate`).

    the directory ── FindSession, Lookup ──> who is wished to hold a copy, and does not yet
        router.hot_prefixes grants it whatever it gains, and moves.py has it made

The wish goes from the directory when the worker tells of its copy. Of the sessions that a gateway
met last some are looked at each WISHES_S: an operator waits, no turn does.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from ownerserve.gateway.asking import SessionFinder
from ownerserve.gateway.turns import Turns

WISHES_S = 10.0
LOOKED_AT_MAX = 64
"""Sessions that are looked at each time: two small requests for each."""


class Wishes:
    """This class has wishes granted that concern one gateway's sessions."""

    def __init__(self, turns: Turns, finder: SessionFinder) -> None:
        self._turns = turns
        self._finder = finder

    async def run(self) -> None:
        """Look for wishes, until cancelled."""
        while True:
            await asyncio.sleep(WISHES_S)
            if self._turns.rollout.is_normal:
                await self._look()

    async def _look(self) -> None:
        sessions = self._turns.state.sessions.newest()
        names = [name for name, _ in islice(sessions, LOOKED_AT_MAX)]
        for name, unit in await self._finder.wishes(names):
            worker = self._turns.state.fleet.find(self._turns.worker_names.here(unit))
            if worker is not None:
                self._turns.hot_prefixes.ask_for(name, worker)
