"""One life of a simulated worker that owns sessions, and has them come and go.

real   what `node.py` says, and besides `Ownership`, `LeavingSessions`, `Takes`, `Comings`, and what
       `moving_turns.py` says
not    what `StepLoop` does of it: written here anew, without a model
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Epoch
from ownerserve.kv.prefix import HashedPrefix, pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskSession,
    AskTokens,
    DropTurn,
    HandOver,
    MoveTurn,
    Nonce,
    Reject,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    Said,
    StopTurn,
    Take,
    TakePrefix,
)
from ownerserve.node.admission import Admission
from ownerserve.node.ownership.ownership import TurnCame, TurnLeft
from ownerserve.node.ownership.taking_over import take_over
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.transfers.moves import LeavingSessions, Takes
from ownerserve.node.transfers.replicas import PrefixTakes
from ownerserve.node.vocabulary.events import CameIn, Effect, TurnEnded
from tests.support.node.lending_nodes import B
from tests.support.node.schedules.moving_turns import MovingTurns
from tests.support.node.schedules.node import LiveTurn, SimNode, prompt_of
from tests.support.node.schedules.owning import DRIFT, SimOwnership

if TYPE_CHECKING:
    from tests.support.node.schedules.moving_world import MovingWorld


class NamedTurn(LiveTurn):
    """A turn of a session. `told`: what its gateway calls it; `begins`: so many tokens of its
    answer were written elsewhere."""

    name: SessionId = SessionId("")
    before: int = 0
    told: TurnId = TurnId("")
    begins: int = 0


class Leg(msgspec.Struct, frozen=True):
    """What a gateway says of a turn that it sends."""

    session: SessionId
    told: TurnId
    epoch: Epoch | None
    before: int
    lender: LenderAddress | None = None


class MovingNode(SimNode):
    """See the module."""

    world: MovingWorld

    def __init__(self, world: MovingWorld, name: str, life: int) -> None:
        super().__init__(world, name, life, slots=world.slots)
        self._boot_s = world.draw.uniform(0.0, 1e6)
        self._pace = 1 + world.draw.uniform(-DRIFT, DRIFT)
        self.apart_from_s = self.apart_until_s = 0.0
        self.gave_up: set[SessionId] = set()
        """Sessions that went elsewhere, and of which no turn came since."""
        self._going: set[SessionId] = set()
        self._waiting: dict[Future[Any], None] = {}
        """What is to be done between two steps: tasks wait for it, which end with this life."""
        self.ownership = SimOwnership(self)
        self._admission = Admission(self.cache.sessions)
        self.comings = Comings(self.handle)
        self._leaving = LeavingSessions(self.cache, self, self.between)
        self.takes = Takes(self.unit, self.cache, self, node=self.comings, on_engine=self.between)
        self._taking: dict[Future[RpcAnswer], None] = {}
        self.prefix_takes = PrefixTakes(
            self.unit, self.cache, node=self.comings, on_engine=self.between
        )
        self.moving_turns = MovingTurns(self)
        self.ownership.start()

    def boot_time_s(self) -> float:
        """By this machine's clock."""
        return self._boot_s + self._pace * self.world.loop.time()

    @property
    def is_apart(self) -> bool:
        """Whether nothing comes from here to the directory."""
        return self.apart_from_s <= self.world.loop.time() < self.apart_until_s

    @property
    def is_slow(self) -> bool:
        """Whether the directory's answers come late here."""
        return self.world.loop.time() < self.apart_from_s

    def kill(self) -> None:
        super().kill()
        self.ownership.stop()
        for pending in (*self._taking, *self._waiting):
            pending.cancel()

    def between(self, work: Callable[[], Any]) -> Future[Any]:
        done = super().between(work)
        self._waiting[done] = None
        done.add_done_callback(self._waiting.pop)
        return done

    # -- turns ---------------------------------------------------------------------------------

    def serve(
        self, turn_id: TurnId, tokens: list[int], leg: Leg, *, answer: int, begins: int = 0
    ) -> WorkerRefusal | None:
        """Take a session's turn in; return why not."""
        prompt, name = prompt_of(tokens), leg.session
        refusal = self.run(turn_id, prompt, answer=answer, session_id=name, lender=leg.lender)
        if refusal is None:
            self.turns[turn_id] = NamedTurn(
                prompt, answer, name=name, before=leg.before, told=leg.told, begins=begins
            )
            self._is_here(name)
            now = self.world.loop.time()
            if take_over(self.cache, name, self.ownership, prompt=prompt, now=now):
                self.world.counts["taken over by a turn"] += 1
            self.ownership.tell(TurnCame(name, None, leg.epoch))
        return refusal

    def goes_on(self, turn_id: TurnId, leg: Leg, tokens: int) -> WorkerRefusal | None:
        """Go on with a turn that was sent here, behind so many tokens; return why not."""
        kept = self.moving_turns.claim(leg.told, tokens)
        if kept is None:
            return WorkerRefusal.UNKNOWN_TURN
        leg, state = msgspec.structs.replace(leg, lender=kept.source), kept.state
        return self.serve(turn_id, state.tokens, leg, answer=state.left, begins=tokens)

    def named_turns(self) -> list[tuple[TurnId, NamedTurn]]:
        return [(one, turn) for one, turn in self.turns.items() if isinstance(turn, NamedTurn)]

    def told_of(self, turn_id: TurnId) -> int:
        """Tokens of its answer that are written."""
        turn = self.turns[turn_id]
        return len(turn.said) + (turn.begins if isinstance(turn, NamedTurn) else 0)

    def writes(self, told: TurnId) -> bool:
        """Whether a turn that its gateway calls so goes on here."""
        named, stopped = self.named_turns(), self.moving_turns.stopped
        return any(turn.told == told and one not in stopped for one, turn in named)

    def leaves(self, turn_id: TurnId, tokens: int) -> None:
        """Its leg ends, behind so many tokens of the answer."""
        turn = self.turns.pop(turn_id)
        self.scheduler.abort(turn_id, self.world.loop.time())
        count = turn.prompt.count
        self.handle(TurnEnded(turn_id, turn.restored, count, count + max(0, len(turn.said) - 1)))
        self.state.report(turn_id)
        self.world.moved_on(turn_id, tokens)
        self._kick()

    def abort(self, turn_id: TurnId) -> None:
        self.moving_turns.stopped.discard(turn_id)
        super().abort(turn_id)

    def _speak(self, turn_id: TurnId, token: int) -> bool:
        is_last, turn = super()._speak(turn_id, token), self.turns[turn_id]
        if isinstance(turn, NamedTurn):
            self.world.wrote(turn.told)
            if not is_last:
                self.world.spoke(turn_id, self.told_of(turn_id) - 1, token)
        return is_last

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
            case Take() if request.turn:
                return self._run(self.moving_turns.coming.take(request, self))
            case Take():
                return self._run(self.takes.take(request, self))
            case TakePrefix():
                return self._run(self.prefix_takes.take(request, self))
            case StopTurn():
                return self._run(self.moving_turns.leaving.send(request, self))
            case MoveTurn():
                return _done(self.moving_turns.coming.keep(request))
            case DropTurn():
                return _done(self.moving_turns.coming.drop(request))
            case AskTokens():
                return self.between(partial(self.prefix_takes.tokens_here, request))
            case ReleaseSession():
                return self.between(partial(self._release, request))
            case _:
                return super().answer(request)

    def _run(self, work: Coroutine[Any, Any, RpcAnswer]) -> Future[RpcAnswer]:
        done = asyncio.run_coroutine_threadsafe(work, self.world.loop)
        self._taking[done] = None
        done.add_done_callback(self._taking.pop)
        return done

    def _release(self, asked: ReleaseSession) -> RpcAnswer:
        session_id = asked.session_id
        if self.ownership.standing(session_id) is not None and self.is_live(session_id):
            return Reject(WorkerRefusal.SESSION_IS_RUNNING)
        given_up = self.ownership.release(asked)
        if isinstance(given_up, Reject):
            return given_up
        let_go = self.let_go(session_id)
        return let_go if asked.epoch is None else given_up

    # -- node.transfers.moves.AskedPeer, turn_moves.AskedTarget --------------------------------

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        """Ask a peer, as `TargetSide` does; not while this process stands still."""
        await self._awake()
        said = await self.service.target.ask(peer, request, within_s=within_s, nonce=nonce)
        await self._awake()
        return said

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        self.service.target.call_off(worker, nonce)

    async def _awake(self) -> None:
        while self.is_frozen:
            await asyncio.sleep(self.frozen_until_s - self.world.loop.time())
        if self.is_dead:
            raise asyncio.CancelledError

    # -- what NodeRuntime does -----------------------------------------------------------------

    def _perform(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, CameIn):
            self.comings.ended(effect)
            return ()
        return super()._perform(effect)

    def books(self) -> dict[str, int]:
        moving = self.moving_turns
        kept, stopped = len(moving.coming), len(moving.stopped)
        return super().books() | {"takes": len(self._taking), "kept": kept, "stopped": stopped}


def _done(said: RpcAnswer) -> Future[RpcAnswer]:
    answer: Future[RpcAnswer] = Future()
    answer.set_result(said)
    return answer


def _is_of(turn: LiveTurn, name: SessionId) -> bool:
    return isinstance(turn, NamedTurn) and turn.name == name
