"""This module has idle sessions move: from workers that get no turns any more, so that who is
drained or leaves becomes empty although no session comes back, and for load's sake. It has hot
prefixes copied, too.

    a worker is drained, by its operator's word or its own, and lends
      its sessions, newest first; of each that runs nothing: where would its next turn go?
    a worker is busy, or one has joined
      the moves that router.gap_moves grants
        Take ──> the target: it brings the state, then asks for the session
        SessionTaken, Reject(reason), or nothing in TAKE_S ──> the router's books; counted
      what it added to another's session is brought to that one, or the target (rests.py)
      a drained worker's that nobody else can take over, where it has a store
        Suspend ──> the worker: it puts the state away, and owns the session no more
    forks wait for a busy worker that has their prefix
      the copies that router.hot_prefixes grants
        TakePrefix ──> the target: it brings the prefix, and nobody's ownership changes

Off the request path. A turn that comes meanwhile goes its own way: then the session stays, or the
turn is a guest's. Several gateways may ask for one session; one of them gets it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine

from ownerserve.gateway.rests import Rests
from ownerserve.gateway.turns import Turns
from ownerserve.gateway.workers.rpc import WorkerLine
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    PrefixTaken,
    Reject,
    Said,
    SessionTaken,
    Suspend,
    Suspended,
    Take,
    TakePrefix,
)
from ownerserve.router.gap_moves import GapMove
from ownerserve.router.hot_prefixes import PrefixCopy
from ownerserve.router.knowledge import end_of
from ownerserve.router.messages import Claimed, LeftToStore, ReleaseEnd, Reported, TakenOver
from ownerserve.router.sessions import RoutedSession
from ownerserve.router.worker import Worker

LOOK_S = 0.25
AT_ONCE = 4
"""Sessions that leave one worker at a time: what it lends costs the turns that still run there."""
RESCAN_S = 2.0
"""So long after the last look at all sessions those are tried again that stayed."""
ELSEWHERE_S = 30.0
"""What is another's by a worker's own word may become that worker's, by another gateway's order."""
TAKE_S = 90.0
"""Longer than a worker tries (node/restore/coming.py)."""
SUSPEND_S = 60.0
"""Longer than copies may take (node/retention/spills.py)."""


_Standing = tuple[int, Epoch | None, Worker | None]
"""A session's turns, the highest epoch heard of it, and who lives that was said to own it and has
not given it up: what is news of where it stands."""


class _Leaving:
    """Which sessions one worker still has to leave with, and which are on their way. `elsewhere`:
    those that are another's by the worker's own word, as each was known then, and until when that
    is believed."""

    def __init__(self) -> None:
        self.names: deque[SessionId] = deque()
        self.next_scan_s = 0.0
        self.under_way: set[SessionId] = set()
        self.elsewhere: dict[SessionId, tuple[_Standing, float]] = {}

    def scanned(self, standing: dict[SessionId, _Standing], now: float) -> None:
        """Take in what stands at the worker now; what was found to be elsewhere is not asked for
        again for a while, unless there is news of it."""
        self.next_scan_s = now + RESCAN_S
        self.elsewhere = {
            name: word for name, word in self.elsewhere.items() if standing.get(name) == word[0]
        }
        believed = {name for name, (_, until_s) in self.elsewhere.items() if until_s > now}
        left_out = believed | self.under_way
        self.names.extend(name for name in standing if name not in left_out)

    def is_elsewhere(self, name: SessionId, known: _Standing, now: float) -> None:
        """Hear from the worker that the session is another's, which was known so when it was asked.
        Its second word is believed: the first one has it ask the directory."""
        before = self.elsewhere.get(name)
        is_second = before is not None and before[0] == known
        self.elsewhere[name] = known, now + ELSEWHERE_S if is_second else now


class Moves:
    """This class orders the moves of one gateway's sessions. `counts`: of those from drained
    workers by how each ended, refusals by reason; metric labels. `rests`: of what guests added."""

    def __init__(self, turns: Turns) -> None:
        self.counts: Counter[str] = Counter()
        self.rests = Rests(turns)
        self._turns = turns
        self._state = turns.state
        self._leaving: dict[Worker, _Leaving] = {}
        self._tasks: dict[asyncio.Task[Said | str], None] = {}

    async def run(self) -> None:
        """Look for sessions that are to leave, until cancelled; what is under way is then called
        off."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if self._turns.rollout.is_normal:
                    self._look()
        finally:
            for task in self._tasks:
                task.cancel()

    def _look(self) -> None:
        drained = [one for one in self._state.fleet if one.is_drained and _lends(one)]
        for worker in [one for one in self._leaving if one not in drained]:
            if not self._leaving[worker].under_way:
                del self._leaving[worker]
        for worker in drained:
            leaving = self._leaving.setdefault(worker, _Leaving())
            if not leaving.names and self._turns.now() >= leaving.next_scan_s:
                leaving.scanned(self._standing_at(worker), self._turns.now())
            while leaving.names and len(leaving.under_way) < AT_ONCE:
                self._leave(leaving.names.popleft(), worker, leaving)
        for granted in self._turns.gap_moves.look(self._turns.now()):
            self._relieve(granted)
        for copy in self._turns.hot_prefixes.look(self._turns.now()):
            self._copy(copy)

    def _standing_at(self, worker: Worker) -> dict[SessionId, _Standing]:
        """Return the sessions that the worker owns, as far as is known here, the newest first."""
        return {
            name: _standing(session)
            for name, session in self._state.sessions.newest()
            if session.owner is worker and session.owner_life == worker.life
        }

    def _leave(self, name: SessionId, source: Worker, leaving: _Leaving) -> None:
        """Have the session, if it is idle, leave the drained worker for where its next turn would
        go, or for the store where nobody else can take it over."""
        now, turns = self._turns.now(), self._turns
        session = self._state.sessions.get(name)
        if session is None or session.pending or session.owner is not source:
            return
        target = self._state.idle.place(name, source, turns.rollout.arm_of(name, None), now)
        if target is None and PlacementAction.TAIL_RECOMPUTE not in source.profile.actions:
            self.counts["no_target"] += 1
            return

        standing = _standing(session)

        def ended(said: Said | str) -> None:
            leaving.under_way.discard(name)
            self.counts[_end_of(said)] += 1
            if isinstance(said, Reject) and end_of(said.reason) is ReleaseEnd.NOT_OWNER:
                leaving.is_elsewhere(name, standing, turns.now())

        leaving.under_way.add(name)
        if target is None:
            self._keep(self._put_away(name, source), ended)
        else:
            self._begin(GapMove(name, source, target), ended)

    def _relieve(self, granted: GapMove) -> None:
        """Have the session leave a busy worker."""
        moves = self._turns.gap_moves

        def ended(said: Said | str) -> None:
            if isinstance(said, SessionTaken):
                moves.taken(granted.session, self._turns.now())
            else:
                moves.stayed(granted.session, _end_of(said))

        self._begin(granted, ended)

    def _copy(self, copy: PrefixCopy) -> None:
        """Have a read-only replica of a prefix made."""
        turns, hot = self._turns, self._turns.hot_prefixes

        def ended(said: Said | str) -> None:
            if isinstance(said, PrefixTaken):
                hot.made(copy.session, said.moved_bytes)
            else:
                hot.missed(copy.session, _end_of(said), turns.now())

        line = turns.lines.of(copy.target.id)
        address = turns.lines.read_by(copy.target, copy.source, turns.worker_names)
        if line is None or address is None or copy.target.unit is None:
            ended("unreachable")
            return
        asked = TakePrefix(copy.session, copy.tokens, address)
        self._keep(self._copied(asked, line, copy.target.unit), ended)

    async def _copied(self, asked: TakePrefix, line: WorkerLine, target: RoutingUnit) -> Said | str:
        """Have the target bring the prefix, and note where it lies from then on."""
        said = await line.ask(asked, TAKE_S)
        if isinstance(said, PrefixTaken):
            told = Reported(target, Tier.DEVICE, None, said.tokens, asked.session_id)
            self._turns.told(told)
        return "no_answer" if said is None else said

    def _begin(self, move: GapMove, ended: Callable[[Said | str], None]) -> None:
        """Begin a move; `ended` hears once what came of it, or why it was not begun."""
        turns, target = self._turns, move.target
        line = turns.lines.of(target.id)
        address = turns.lines.read_by(target, move.source, turns.worker_names)
        if line is None or address is None or target.unit is None:
            ended("unreachable")
            return
        take = Take(move.session, address, with_state=not move.source.is_drained)
        self._keep(self._move(move, take), ended)

    def _keep(
        self, work: Coroutine[None, None, Said | str], ended: Callable[[Said | str], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None

        def over(done: asyncio.Task[Said | str]) -> None:
            self._tasks.pop(done, None)
            ended("called_off" if done.cancelled() else done.result())

        task.add_done_callback(over)

    async def _put_away(self, name: SessionId, source: Worker) -> Said | str:
        line = self._turns.lines.of(source.id)
        said = "unreachable" if line is None else await line.ask(Suspend(name), SUSPEND_S)
        if isinstance(said, Suspended):
            self._turns.told(LeftToStore(name, source.id))
        return "no_answer" if said is None else said

    async def _move(self, move: GapMove, take: Take) -> Said | str:
        name, source, target = move.session, move.source.id, move.target.id
        line = self._turns.lines.of(target)
        said = None if line is None else await line.ask(take, TAKE_S)
        if said is None:
            return "no_answer"
        if said == Reject(WorkerRefusal.NOT_OWNER) and move.source.is_drained:
            await self.rests.bring(move)
        units = [one.unit for one in self._state.fleet if one.id == target]
        if not isinstance(said, SessionTaken) or not units or units[0] is None:
            return said
        self._turns.told(TakenOver(name, units[0], source, said.tokens))
        if said.epoch is not None:
            self._turns.told(Claimed(name, units[0], said.epoch, said.version))
        return said


def _standing(session: RoutedSession) -> _Standing:
    grant = session.grant
    return session.turns, session.epoch, None if grant is None else grant.live_owner


def _lends(worker: Worker) -> bool:
    return Tier.DEVICE in worker.profile.lends


def _end_of(said: Said | str) -> str:
    match said:
        case str():
            return said
        case SessionTaken():
            return "taken"
        case Suspended():
            return "suspended"
        case Reject(reason):
            return reason.value
        case _:
            return "malformed"
