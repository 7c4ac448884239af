"""Asks owners to hand sessions over to where their turns are done now, or to end one whose last
turn was done elsewhere: off the request path.

Owns the questions under way; router/knowledge.py decides which are asked, and how many at once.

    AskRelease ── ReleaseSession over the node's RPC ──> the owner ── Transfer ──> directory
    ReleaseEnded <── Released, Reject(reason), or nothing in RELEASE_S ──┘
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from ownerserve.gateway.workers.rpc import WorkerLines, WorkerNames
from ownerserve.kv.wire.rpc import Reject, Released, ReleaseSession, Said
from ownerserve.router.knowledge import end_of
from ownerserve.router.messages import AskRelease, ReleaseEnd, ReleaseEnded

RELEASE_S = 2.0
"""An owner that says nothing for so long may still have handed over: the next answer tells."""


class Releasing:
    """`tell` hears how each question ended. `counts`: the same by outcome, refusals by reason."""

    def __init__(
        self, lines: WorkerLines, names: WorkerNames, *, tell: Callable[[ReleaseEnded], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._lines = lines
        self._names = names
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, wanted: AskRelease) -> None:
        """Begin to ask; nothing waits for the answer."""
        target = self._names.to_workers(wanted.target)
        known = None if target is None else ReleaseSession(wanted.session, wanted.epoch, target)
        self._begin(wanted, known)

    def end(self, wanted: AskRelease) -> None:
        """The turn at the target was the session's last: its owner is asked to end it."""
        self._begin(wanted, ReleaseSession(wanted.session, wanted.epoch))

    def _begin(self, wanted: AskRelease, request: ReleaseSession | None) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(wanted, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Ask nobody any more."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, wanted: AskRelease, request: ReleaseSession | None) -> None:
        end = ReleaseEnd.KEPT
        try:
            end = self._end_of(await self._answer(wanted, request))
        finally:
            self._tell(ReleaseEnded(wanted.session, wanted.epoch, end))

    async def _answer(self, wanted: AskRelease, request: ReleaseSession | None) -> Said | str:
        line = self._lines.of(wanted.source.worker)
        if line is None or request is None:
            return "unreachable"
        answer = await line.ask(request, RELEASE_S)
        return "no_answer" if answer is None else answer

    def _end_of(self, answer: Said | str) -> ReleaseEnd:
        match answer:
            case Released():
                self.counts["released"] += 1
                return ReleaseEnd.RELEASED
            case Reject(reason):
                self.counts[reason.value] += 1
                return end_of(reason)
            case str():
                self.counts[answer] += 1
            case _:
                self.counts["malformed"] += 1
        return ReleaseEnd.KEPT
