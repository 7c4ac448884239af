"""One life of a simulated worker that owns sessions, and has them come and go.

real   what `node.py` says, and besides `Ownership`, `LeavingSessions`, `Takes`, `Comings`
not    what `StepLoop` does of it: written here anew, without a model
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Epoch
from ownerserve.kv.prefix import HashedPrefix, pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskSession,
    HandOver,
    Nonce,
    Reject,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    Said,
    Take,
)
from ownerserve.node.admission import Admission
from ownerserve.node.ownership.ownership import TurnCame, TurnLeft
from ownerserve.node.ownership.taking_over import take_over
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.transfers.moves import LeavingSessions, Takes
from ownerserve.node.vocabulary.events import CameIn, Effect
from tests.support.node.lending_nodes import B
from tests.support.node.schedules.node import LiveTurn, SimNode, prompt_of
from tests.support.node.schedules.owning import DRIFT, SimOwnership
from tests.support.node.schedules.schedule import ANSWER

if TYPE_CHECKING:
    from tests.support.node.schedules.moving_world import MovingWorld


class NamedTurn(LiveTurn):
    """A turn of a session."""

    name: SessionId = SessionId("")
    before: int = 0


class MovingNode(SimNode):
    """See the module."""

    world: MovingWorld

    def __init__(self, world: MovingWorld, name: str, life: int) -> None:
        super().__init__(world, name, life, slots=world.slots)
        self._boot_s = world.draw.uniform(0.0, 1e6)
        self._pace = 1 + world.draw.uniform(-DRIFT, DRIFT)
        self.apart_until_s = 0.0
        self.gave_up: set[SessionId] = set()
        """Sessions that went elsewhere, and of which no turn came since."""
        self._going: set[SessionId] = set()
        self.ownership = SimOwnership(self)
        self._admission = Admission(self.cache.sessions)
        self._comings = Comings(self.handle)
        self._leaving = LeavingSessions(self.cache, self, self.between)
        self.takes = Takes(self.unit, self.cache, self, node=self._comings, on_engine=self.between)
        self._taking: dict[Future[RpcAnswer], None] = {}
        self.ownership.start()

    def boot_time_s(self) -> float:
        """By this machine's clock."""
        return self._boot_s + self._pace * self.world.loop.time()

    @property
    def is_apart(self) -> bool:
        """Whether nothing comes from here to the directory."""
        return self.world.loop.time() < self.apart_until_s

    def kill(self) -> None:
        super().kill()
        self.ownership.stop()
        for taking in list(self._taking):
            taking.cancel()

    # -- turns ---------------------------------------------------------------------------------

    def serve(
        self,
        turn_id: TurnId,
        tokens: list[int],
        name: SessionId,
        *,
        epoch: Epoch | None,
        before: int,
        lender: LenderAddress | None,
    ) -> WorkerRefusal | None:
        """Take a session's turn in; return why not."""
        prompt = prompt_of(tokens)
        refusal = self.run(turn_id, prompt, answer=ANSWER, session_id=name, lender=lender)
        if refusal is None:
            self.turns[turn_id] = NamedTurn(prompt, ANSWER, name=name, before=before)
            self._is_here(name)
            now = self.world.loop.time()
            if take_over(self.cache, name, self.ownership, prompt=prompt, now=now):
                self.world.counts["taken over by a turn"] += 1
            self.ownership.tell(TurnCame(name, None, epoch))
        return refusal

    def asked_to_go(self, name: SessionId) -> None:
        """The directory is asked to let it go."""
        self._going.add(name)

    def turns_since(self, name: SessionId) -> bool:
        """Whether a turn of it came since it was asked to go."""
        return name not in self._going

    def _is_here(self, name: SessionId) -> None:
        self._going.discard(name)
        self.gave_up.discard(name)

    def turns_of(self, name: SessionId) -> list[TurnId]:
        return [one for one, turn in self.turns.items() if _is_of(turn, name)]

    def _over(self, turn_id: TurnId) -> None:
        turn = self.turns[turn_id]
        if isinstance(turn, NamedTurn):
            said = [*turn.prompt.plain(0, turn.prompt.count), *turn.said[:-1]]
            if len(said) >= B:
                self.world.finishes(self, turn.name)
            self.ownership.tell(TurnLeft(turn.name, pack(said), before=turn.before))
        super()._over(turn_id)

    # -- node.transfers.moves.MovingEngine -----------------------------------------------------

    def is_live(self, session_id: SessionId) -> bool:
        return bool(self.turns_of(session_id))

    def let_go(self, session_id: SessionId) -> RpcAnswer:
        return self._admission.release_session(session_id)

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None:
        self.world.counts["installed"] += 1
        self._is_here(session_id)

    # -- the port ------------------------------------------------------------------------------

    def answer(self, request: RpcRequest) -> Future[RpcAnswer]:
        match request:
            case AskSession():
                return self.between(partial(self._leaving.stands, request))
            case HandOver():
                answer: Future[RpcAnswer] = Future()
                answer.set_running_or_notify_cancel()
                self.between(partial(self._leaving.hand_over, request, answer))
                return answer
            case Take():
                taking = self.takes.take(request, self)
                done = asyncio.run_coroutine_threadsafe(taking, self.world.loop)
                self._taking[done] = None
                done.add_done_callback(self._taking.pop)
                return done
            case ReleaseSession():
                return self.between(partial(self._release, request))
            case _:
                return super().answer(request)

    def _release(self, asked: ReleaseSession) -> RpcAnswer:
        session_id = asked.session_id
        if self.ownership.standing(session_id) is not None and self.is_live(session_id):
            return Reject(WorkerRefusal.SESSION_IS_RUNNING)
        given_up = self.ownership.release(asked)
        if isinstance(given_up, Reject):
            return given_up
        let_go = self.let_go(session_id)
        return let_go if asked.epoch is None else given_up

    # -- node.transfers.moves.AskedPeer --------------------------------------------------------

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        """Ask a peer, as `TargetSide` does; not while this process stands still."""
        await self._awake()
        said = await self.service.target.ask(peer, request, within_s=within_s, nonce=nonce)
        await self._awake()
        return said

    async def _awake(self) -> None:
        while self.is_frozen:
            await asyncio.sleep(self.frozen_until_s - self.world.loop.time())
        if self.is_dead:
            raise asyncio.CancelledError

    # -- what NodeRuntime does -----------------------------------------------------------------

    def _perform(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, CameIn):
            self._comings.ended(effect)
            return ()
        return super()._perform(effect)

    def books(self) -> dict[str, int]:
        return super().books() | {"takes": len(self._taking)}


def _is_of(turn: LiveTurn, name: SessionId) -> bool:
    return isinstance(turn, NamedTurn) and turn.name == name
