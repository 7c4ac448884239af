"""This module has what a guest added to a session brought to who goes on with it, before the guest
is gone: a rest.

    a drained worker says of a session whose last turn it served that it is another's
      who owns it: by the last word heard, else by the directory's
        TakePrefix ──> the owner; where that takes no turns, whoever would have the next one
        PrefixTaken ──> the router: the session is there. LetGo ──> the guest: it need not stay

Nobody's ownership changes. It is a replica as any (node/transfers/replicas.py): by content,
verified as it comes, and the first to go where room is wanted. Owns no session; off the request
path.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from ownerserve.gateway.turns import Turns
from ownerserve.gateway.workers.rpc import WorkerLine
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.rpc import PrefixTaken, Reject, Said, TakePrefix
from ownerserve.router.gap_moves import GapMove
from ownerserve.router.messages import LetGo, TakenOver
from ownerserve.router.pricing import shares_state
from ownerserve.router.worker import Worker

BRING_S = 90.0
"""Longer than a worker tries (node/restore/coming.py)."""
LOOK_S = 0.25
"""How often it is looked whether who brings it still takes turns: other sessions wait to leave."""


class Rests:
    """This class has rests brought by the workers of one gateway. `counts`: by how each ended,
    refusals by reason; metric labels. `moved_bytes`: of those that were brought."""

    def __init__(self, turns: Turns) -> None:
        self.counts: Counter[str] = Counter()
        self.moved_bytes = 0
        self._turns = turns

    async def bring(self, move: GapMove) -> None:
        """Have what `move.source` added to the session as a guest brought to its owner, or to
        `move.target` where that takes no turns or nobody knows who it is."""
        self.counts[await self._brought(move)] += 1

    async def _brought(self, move: GapMove) -> str:
        name, guest, turns = move.session, move.source, self._turns
        owner = await self._owner(name, guest)
        if owner is guest:
            return "its_own"
        session = turns.state.sessions.get(name)
        if session is None or session.pending or session.owner is not guest:
            return "went_on"
        takes_it = owner is not None and owner.up and shares_state(owner, guest)
        to = owner if owner is not None and takes_it else move.target
        line, unit = turns.lines.of(to.id), to.unit
        address = turns.lines.read_by(to, guest, turns.worker_names)
        if line is None or address is None or unit is None or guest.unit is None:
            return "unreachable"
        turns_before = session.turns
        said = await _asked(line, TakePrefix(name, session.known_tokens, address), to)
        if isinstance(said, Reject):
            return said.reason.value
        if not isinstance(said, PrefixTaken):
            return "no_answer" if said is None else "malformed"
        self.moved_bytes += said.moved_bytes
        if session.is_forgotten or session.turns != turns_before or session.owner is not guest:
            return "went_on"
        turns.told(TakenOver(name, unit, guest.id, said.tokens))
        turns.releasing.let_go(LetGo(name, guest.unit))
        return "brought"

    async def _owner(self, name: SessionId, guest: Worker) -> Worker | None:
        """Return who owns the session by the last word heard; the guest gave it as another's, so
        that a word of its own is asked of the directory anew. None: nobody knows."""
        turns = self._turns
        session = turns.state.sessions.get(name)
        grant = None if session is None else session.grant
        owner = None if grant is None else grant.live_owner
        if (owner is not None and owner is not guest) or turns.finder is None:
            return None if owner is guest else owner
        unit = await turns.finder.owner_of(name)
        return None if unit is None else turns.state.fleet.find(unit)


async def _asked(line: WorkerLine, request: TakePrefix, to: Worker) -> Said | None:
    """Return the worker's answer; None: none in time, or it takes no turns any more, and the
    request is called off."""
    asking, life = asyncio.ensure_future(line.ask(request, BRING_S)), to.life
    try:
        while to.up and to.life == life and not asking.done():
            await asyncio.wait({asking}, timeout=LOOK_S)
        return asking.result() if asking.done() else None
    finally:
        asking.cancel()
