"""The directory as the gateway reaches it: asked in batches, off the request path.

Owns the batch in flight. An embedded directory answers in the loop itself; a shared one, whose
client blocks, in a thread of its own. Only a session that this gateway has never seen is looked up
before its turn is sent: another gateway may know its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ownerserve.directory.messages import Outcome, Refusal, Refused, Request
from ownerserve.directory.port import Directory
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import Incarnation, SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.owners import Owners
from ownerserve.router.gateway.receipts import unit_of
from ownerserve.router.gateway.stamps import Extent, Stamp
from ownerserve.router.messages import Arrive, Claimed, Dispatch
from ownerserve.router.profile import Profile

log = logging.getLogger("ownerserve.gateway")

LOOK_UP_S = 0.25
"""A directory that takes longer is not waited for: the turn goes by what is known here."""

TICK_S = 0.5
SWEEP_RECORDS = 200
"""Looked at in each tick: 10^5 records in some four minutes, a millisecond at a time."""


class DirectoryLink:
    """`tell` hears what the directory decided; `is_shared`: other gateways decide too."""

    def __init__(
        self, directory: Directory, *, is_shared: bool, tell: Callable[[Claimed], None]
    ) -> None:
        self.owners = Owners()
        self._lives: dict[tuple[Incarnation, int], RoutingUnit] = {}
        """Lives that answer, as this gateway names them."""
        self.is_shared = is_shared
        self._directory = directory
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "directory") if is_shared else None
        self._asking: asyncio.Task[None] | None = None
        self._is_failing = False
        """Whether the last batch met a fault."""

    # ---- what the gateway sees

    def heard(self, unit: RoutingUnit, profile: Profile | None) -> None:
        """A worker answers. One that owns sessions speaks for itself."""
        self._lives[unit.incarnation, unit.dp_rank] = unit
        if profile is None or not profile.owns_sessions:
            self.owners.lives(unit)
            self._ask_soon()

    def silent(self, worker: str) -> None:
        """A worker is down."""
        self._lives = {life: unit for life, unit in self._lives.items() if unit.worker != worker}
        self.owners.silent(worker)

    def began(self, dispatch: Dispatch, arrive: Arrive, stamp: Stamp | None) -> None:
        """A worker began to answer a turn. The directory hears of it only then: a turn that was
        sent somewhere, or is answered by a life that is over, moves no session."""
        worker = dispatch.decision.worker
        unit = unit_of(worker)
        if unit is None or not worker.up or dispatch.session is None:
            return
        if worker.profile.owns_sessions or (stamp is not None and stamp.unit != unit):
            return
        self.owners.runs_at(dispatch.session, unit, parent=arrive.parent)
        self._ask_soon()

    def reported(self, dispatch: Dispatch, unit: RoutingUnit, extent: Extent) -> None:
        """A worker holds the prompt of this turn."""
        if dispatch.session is not None and not dispatch.decision.worker.profile.owns_sessions:
            self.owners.stands_on(dispatch.session, unit, extent)
            self._ask_soon()

    def ended(self, dispatch: Dispatch) -> None:
        """The session of this turn is over."""
        if dispatch.session is not None and not dispatch.decision.worker.profile.owns_sessions:
            self.owners.ends(dispatch.session)
            self._ask_soon()

    async def look_up(self, session: SessionId) -> None:
        """Ask who owns it, for a moment."""
        requests = [self.owners.question(session)]
        try:
            async with asyncio.timeout(LOOK_UP_S):
                outcomes = await self._execute(requests)
        except TimeoutError:
            self.owners.answers["too_slow"] += 1
            return
        self._hear(requests, outcomes)

    # ---- the batch in flight

    async def run(self) -> None:
        """Renew leases until cancelled; clean up in a directory that is ours alone."""
        while True:
            self._ask_soon()
            if not self.is_shared:
                self._directory.sweep(SWEEP_RECORDS)
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._directory.close()

    def _ask_soon(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        while requests := self.owners.due(self._loop.time()):
            self._hear(requests, await self._execute(requests))

    async def _execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """A fault of the directory's is told once, and counts as silence: no turn waits for it."""
        try:
            outcomes = await self._executed(requests)
            if len(outcomes) != len(requests):
                raise InvariantViolated(f"{len(outcomes)} answers to {len(requests)} requests")
        except Exception:
            self.owners.answers["failed"] += 1
            if not self._is_failing:
                log.exception("the directory fails: asked again until it answers")
            self._is_failing = True
            return [Refused(Refusal.UNREACHABLE) for _ in requests]
        self._is_failing = False
        return outcomes

    async def _executed(self, requests: Sequence[Request]) -> list[Outcome]:
        if self._thread is None:
            return self._directory.execute(requests)
        return await self._loop.run_in_executor(self._thread, self._directory.execute, requests)

    def _hear(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        for news in self.owners.answered(requests, outcomes):
            unit = news.unit  # a worker that speaks for itself has a name of its own
            here = self._lives.get((unit.incarnation, unit.dp_rank), unit)
            self._tell(Claimed(news.session, here, news.epoch))
