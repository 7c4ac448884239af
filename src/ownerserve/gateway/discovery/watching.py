"""Watching carries what sources of workers say to the roster, while the gateway serves.

Owns the tasks: one a source, one that looks again at who could not join yet, one for each worker
that is joining.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from ownerserve.gateway.discovery.members import Change, Hold, Join, Leave, Member, Members, Resume
from ownerserve.gateway.logs import tell
from ownerserve.gateway.roster import Roster, RosterRefused, Stay
from ownerserve.kv.ids import WorkerId

log = logging.getLogger("ownerserve.gateway")

BEGIN_S = 5.0
"""How long the first word of sources is waited for before the port is opened."""
LOOK_S = 1.0


class Source(Protocol):
    """A source names workers from time to time."""

    @property
    def name(self) -> str:
        """`name` is what logs and metrics call it."""
        ...

    async def watch(
        self, heard: Callable[[Sequence[Member]], None], lost: Callable[[str], None]
    ) -> None:
        """Tell until cancelled all whom it names whenever that may have changed, or why nothing
        can be said now: what was said last stands then."""
        ...


class Discovery:
    """The discovery of one gateway: its sources, what they said, and what became of it."""

    def __init__(self, roster: Roster, sources: Sequence[Source]) -> None:
        self.failures: Counter[str] = Counter()
        """How often a source could not say anything, by its name."""
        self.causes: dict[str, str] = {}
        """Why a source can't say anything now."""
        self._roster = roster
        self._sources = sources
        self._members = Members()
        self._tasks: list[asyncio.Task[None]] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._first = {source.name: asyncio.Event() for source in sources}

    def named(self) -> dict[str, int]:
        """Return how many workers each source names."""
        return {source.name: self._members.named_by(source.name) for source in self._sources}

    async def begin(self) -> None:
        """Begin to watch, and wait for the first word of each source and for those who join by it,
        but not for ever."""
        loop = asyncio.get_running_loop()
        watches = [self._watch(source) for source in self._sources]
        self._tasks = [loop.create_task(watch) for watch in (*watches, self._look())]
        firsts = [event.wait() for event in self._first.values()]
        try:
            async with asyncio.timeout(BEGIN_S):
                await asyncio.gather(*firsts)
                await asyncio.gather(*self._joining, return_exceptions=True)
        except TimeoutError:
            silent = [name for name, event in self._first.items() if not event.is_set()]
            log.warning("workers are not all known yet: %s", ", ".join(silent) or "they join")

    def listed(self, worker: WorkerId) -> None:
        """Hear that the settings list the worker now: no source holds it or takes it out."""
        self._members.listed(worker)
        self._roster.resume(worker)

    def unlisted(self, worker: WorkerId) -> bool:
        """Hear that the settings list a worker no more that is here; return whether it stays, as a
        source names it."""
        return self._members.unlisted(worker)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks, *self._joining]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, source: Source) -> None:
        name = source.name

        def heard(members: Sequence[Member]) -> None:
            if self.causes.pop(name, None) is not None:
                tell(logging.INFO, "discovery_back", source=name)
            self._apply(self._members.heard(name, members, here=self._here()))
            self._first[name].set()

        def lost(cause: str) -> None:
            self.failures[name] += 1
            if self.causes.get(name) != cause:
                tell(logging.WARNING, "discovery_lost", source=name, cause=cause)
            self.causes[name] = cause
            self._first[name].set()

        while True:
            try:
                await source.watch(heard, lost)
            except Exception as error:  # a task's root: a source must not go silent for ever
                log.exception("%s: a fault", name)
                lost(f"a fault: {type(error).__name__}")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Look again from time to time: who could not join as it was leaving may be gone now."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._apply(self._members.look(self._here()))

    def _here(self) -> dict[WorkerId, Stay]:
        return {worker: self._roster.stay(worker) for worker in self._roster.monitors}

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Join():
                    task = asyncio.get_running_loop().create_task(self._join(change))
                    self._joining.add(task)
                    task.add_done_callback(self._joining.discard)
                case Leave(worker):
                    self._roster.leave(worker, word="no source names it any more")
                case Hold(worker):
                    self._roster.hold(worker, word="its source says that it is not ready")
                case Resume(worker):
                    self._roster.resume(worker)

    async def _join(self, change: Join) -> None:
        member = change.member
        stay = Stay.SERVING if member.is_ready else Stay.UNREADY
        try:
            await self._roster.join(member.address, by=change.by, stay=stay)
        except RosterRefused as error:  # an operator was faster
            log.info("%s", error)
        except Exception:  # a task's root
            log.exception("worker %s could not join", member.address.worker)
