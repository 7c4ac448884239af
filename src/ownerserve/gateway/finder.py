"""The finder asks the directory, for a moment, who owns a session that is new to this gateway.

Owns the look-ups that wait. Nothing is decided here: workers own, and say so themselves.

    turns of unknown sessions ── waiting ──> one frame at a time ──> directory
    turns go on <── Claimed, or LOOK_UP_S is over ──────────────────────┘

A frame that takes longer than LOOK_UP_S makes nobody wait any more until it ends: a directory that
hangs delays the turns that asked with it, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ownerserve.directory.messages import (
    DirectoryRefusal,
    FindSession,
    Miss,
    Outcome,
    Refused,
    SessionIs,
)
from ownerserve.directory.port import Directory
from ownerserve.gateway.workers.rpc import WorkerNames
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, later
from ownerserve.router.messages import Claimed

log = logging.getLogger("ownerserve.gateway")

LOOK_UP_S = 0.25
"""A directory that takes longer is not waited for: the turn goes by what is known here."""
FRAME_MAX = 256


class SessionFinder:
    """The finder asks a directory, whose client blocks, in a thread of its own. `tell` hears of
    owners."""

    def __init__(
        self, directory: Directory, names: WorkerNames, *, tell: Callable[[Claimed], None]
    ) -> None:
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels."""
        self._directory = directory
        self._tell = tell
        self._seen: Epoch | None = None
        self._names = names
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "directory")
        self._waiting: dict[SessionId, asyncio.Future[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._is_failing = False
        """Whether the last frame met a fault."""

    def heard(self, epoch: Epoch) -> None:
        """Remember an epoch under which a worker owns: a directory that does not know it has lost
        memory."""
        self._seen = later(self._seen, epoch)

    async def look_up(self, session: SessionId) -> None:
        """Ask who owns the session, and wait for the answer for LOOK_UP_S at most."""
        if self._is_late():
            self.answers["not_asked"] += 1
            return
        answered = self._waiting.get(session)
        if answered is None:
            answered = self._waiting[session] = self._loop.create_future()
        if self._asking is None or self._asking.done():
            self._asked_s = self._loop.time()  # who waits counts from here
            self._asking = self._loop.create_task(self._ask())
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await asyncio.shield(answered)
        except TimeoutError:
            self.answers["too_slow"] += 1

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for answered in self._waiting.values():
            answered.cancel()
        # Behind the frame under way: a client's socket is its thread's.
        self._thread.submit(self._directory.close)
        self._thread.shutdown(wait=False)

    def _is_late(self) -> bool:
        """Return whether the frame under way takes too long to stand behind it."""
        is_asking = self._asking is not None and not self._asking.done()
        return is_asking and self._loop.time() - self._asked_s >= LOOK_UP_S

    async def _ask(self) -> None:
        """Ask frame by frame, until nobody waits."""
        while self._waiting:
            sessions = list(self._waiting)[:FRAME_MAX]
            answered = [self._waiting.pop(session) for session in sessions]
            outcomes = await self._execute([FindSession(one, self._seen) for one in sessions])
            for session, outcome in zip(sessions, outcomes, strict=True):
                self._hear(session, outcome)
            for one in answered:
                if not one.done():
                    one.set_result(None)
            self._asked_s = self._loop.time()

    async def _execute(self, requests: Sequence[FindSession]) -> list[Outcome]:
        """Ask one frame; a fault of the directory's is logged once and counts as silence, so that
        no turn waits for it."""
        try:
            outcomes = await self._loop.run_in_executor(
                self._thread, self._directory.execute, requests
            )
            if len(outcomes) != len(requests):
                raise InvariantViolated(f"{len(outcomes)} answers to {len(requests)} requests")
        except Exception:  # whatever a backend raises
            self.answers["failed"] += 1
            if not self._is_failing:
                log.exception("the directory fails: asked again until it answers")
            self._is_failing = True
            return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]
        self._is_failing = False
        return outcomes

    def _hear(self, session: SessionId, outcome: Outcome) -> None:
        match outcome:
            case Refused(reason):
                self.answers[reason.lower()] += 1
            case Miss():  # nobody owns it: it goes where the policy says
                self.answers["miss"] += 1
            case SessionIs(owner, epoch, version):
                self.answers["session_is"] += 1
                self.heard(epoch)
                if outcome.owner_live:
                    self._tell(Claimed(session, self._names.here(owner), epoch, version))
            case _:
                self.answers["malformed"] += 1
