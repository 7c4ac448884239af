"""A gateway of a schedule: turns are sent where the router says, and sessions are ordered to move.

real   `RouterState`, `GapMoves`, `Moves`, `Releasing`, the lines to workers, workers' names
not    HTTP: a turn and its answer are calls; probes; whom it asks for places (nobody)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ownerserve.directory.messages import FindSession, SessionIs
from ownerserve.gateway.moves import TAKE_S, Moves
from ownerserve.gateway.turns import Turns
from ownerserve.gateway.workers.rpc import Releasing, WorkerLines, WorkerNames
from ownerserve.kv.ids import SessionId, TurnId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, later
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.rpc import Reject, SessionTaken, Take
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.ownership.ownership import OwnerIs
from ownerserve.router.gap_moves import GapMoves
from ownerserve.router.hot_prefixes import HotPrefixes
from ownerserve.router.messages import (
    Aborted,
    Arm,
    Arrive,
    AskRelease,
    Claimed,
    Dispatch,
    Done,
    Down,
    Event,
    Failed,
    Failure,
    FirstByte,
    LetGo,
    Refuse,
    Stamped,
    TakenOver,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, Receipt
from tests.support.node.schedules.schedule import ANSWER

if TYPE_CHECKING:
    from tests.support.node.schedules.moving_node import MovingNode
    from tests.support.node.schedules.moving_world import MovingWorld

PROBE_S = 0.5
SILENT_PROBES = 3
PATIENCE_S = 4.0
"""So long a turn may be without an answer before another worker is asked."""
LOOK_UP_S = 0.25
BYTES_A_TOKEN = 4
PROFILE = Profile(spec_digest="toy")
POLICIES = ("ownerserve", "ear", "sticky", "least_load")


class Call(msgspec.Struct, eq=False):
    """A turn on its way, and the life that it was sent to."""

    session: SessionId
    prompt: list[int]
    turn_id: TurnId
    unit: RoutingUnit


class _Rollout:
    """No rollout is under way."""

    is_normal = True

    def arm_of(self, name: SessionId, tenant: object) -> Arm:
        return Arm.MAIN


class Gateway:
    """One life of it. To `Moves` it is its `Turns`."""

    def __init__(self, world: MovingWorld, number: int) -> None:
        self.world, self.number = world, number
        self.is_dead = False
        self.state = RouterState(make_policy(world.draw.choice(POLICIES)))
        self.rollout = _Rollout()
        self.lines = WorkerLines(key=cast(FleetKey, self))  # they say by it whose they are
        self.worker_names = WorkerNames()
        self.releasing = Releasing(self.lines, self.worker_names, tell=self.told)
        self.gap_moves = GapMoves(self.state, lambda _: Arm.MAIN)
        self.hot_prefixes = HotPrefixes(self.state)
        self.moves = Moves(cast(Turns, self))
        self.drained: set[WorkerId] = set()
        self.ordered: dict[asyncio.Task[None], None] = {}
        """Moves that were ordered by hand and are not over: in their order, which is none in a
        set."""
        self._calls: dict[Receipt, Call] = {}
        self._silent: dict[WorkerId, int] = {}
        self._seen: Epoch | None = None
        self._moving = world.loop.create_task(self.moves.run())
        self._probe()

    def now(self) -> float:
        return self.world.loop.time()

    def soon(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.loop.call_later(delay_s, lambda: None if self.is_dead else action())

    def kill(self) -> None:
        """End this life: nobody is told."""
        self.is_dead = True
        self._moving.cancel()
        for task in self.ordered:
            task.cancel()
        self.lines.close()

    # -- workers -------------------------------------------------------------------------------

    def drain(self, worker: WorkerId) -> None:
        self.drained.add(worker)
        self._handle(WorkerDown(worker, Down.DRAINED))

    def undrain(self, worker: WorkerId) -> None:
        self.drained.discard(worker)

    def _probe(self) -> None:
        self.soon(PROBE_S, self._probe)
        for node in self.world.lives:
            worker = WorkerId(node.name)
            self._silent[worker] = self._silent.get(worker, 0) + 1
            if self._silent[worker] == SILENT_PROBES and worker not in self.drained:
                self._handle(WorkerDown(worker, Down.UNHEALTHY))
                self.worker_names.down(worker)
            node.soon(lambda node=node: self._says(cast("MovingNode", node)))  # type: ignore[misc]

    def _says(self, node: MovingNode) -> None:
        load = node.scheduler.load()
        said = WorkerLoad(
            node.unit, self.now(), load.pending_prefill_tokens, len(node.turns), load.waiting, 0, 0
        )
        self.soon(0.001, lambda: self._heard(said))

    def _heard(self, said: WorkerLoad) -> None:
        unit = said.unit
        node = self.world.at(unit.worker)
        if node is None or node.unit != unit:
            return
        self._silent[unit.worker] = 0
        self.worker_names.up(unit, unit.worker)
        self.lines.learn(unit.worker, unit.worker, f"tcp://{unit.worker}:1")
        self._handle(WorkerUp(unit.worker, 0, unit.incarnation, PROFILE))
        if unit.worker in self.drained:
            self._handle(WorkerDown(unit.worker, Down.DRAINED))
        self._handle(Stamped(said))

    def sessions_at(self, unit: RoutingUnit) -> list[SessionId]:
        """The sessions that are the unit's, as far as is known here."""
        return [
            name
            for name, known in self.state.sessions.items()
            if known.owner is not None
            and known.owner.unit == unit
            and known.owner_life == known.owner.life
        ]

    # -- turns ---------------------------------------------------------------------------------

    def turn(self, session: SessionId, prompt: list[int]) -> None:
        """Send a turn where the router wants it; of a session that is new, once the directory has
        been asked."""
        if self.state.sessions.get(session) is None:
            self._look_up(session)
            self.soon(LOOK_UP_S, lambda: self._arrive(session, prompt))
        else:
            self._arrive(session, prompt)

    def _arrive(self, session: SessionId, prompt: list[int]) -> None:
        if self.world.is_wanted(session, prompt):
            self._go(session, prompt, Arrive(session, BYTES_A_TOKEN * len(prompt)))

    def _go(self, session: SessionId, prompt: list[int], event: Arrive | Failed) -> None:
        outcome = cast("Dispatch | Refuse", self._handle(event))
        if not isinstance(outcome, Dispatch):
            return None  # the client asks again
        node = cast("MovingNode | None", self.world.at(outcome.worker))
        unit = self.state.fleet[outcome.worker].unit
        if node is None or node.unit != unit:
            return self._go(session, prompt, Failed(outcome.receipt, Failure.CONNECT))
        turn_id = self.world.new_turn()
        self._calls[outcome.receipt] = Call(session, prompt, turn_id, node.unit)
        known = self.state.sessions.get(session)
        epoch = None if known is None else known.epoch
        before = 0 if known is None or known.grant is None else known.grant.version
        lender = self.lines.lender_of(outcome.decision, self.worker_names)

        def sent() -> None:
            refusal = node.serve(
                turn_id, prompt, session, epoch=epoch, before=before, lender=lender
            )
            if refusal is None:
                self.world.sent(turn_id, session, prompt, self, outcome.receipt)
            else:
                self.soon(0.001, lambda: self._failed(outcome.receipt, Failure.REFUSED))

        self.world.loop.call_later(0.001, node.soon, sent)
        self.soon(PATIENCE_S, lambda: self._late(outcome.receipt, node))
        return None

    def answered(self, receipt: Receipt, said: list[int], owner: OwnerIs | None) -> None:
        """The worker has answered, and says whose the session is."""
        call = self._calls.pop(receipt, None)
        if call is None:
            return
        self._handle(FirstByte(receipt))
        if owner is not None:
            self.told(Claimed(call.session, owner.unit, owner.epoch, owner.version or 0))
        asked = self._handle(Done(receipt, Usage(len(call.prompt), ANSWER, 0)))
        if isinstance(asked, AskRelease):
            self.releasing.ask(asked)
        self.world.done(call.session, call.prompt, said)

    def _late(self, receipt: Receipt, node: MovingNode) -> None:
        call = self._calls.get(receipt)
        if call is not None:
            node.soon(lambda: node.abort(call.turn_id))
            self._failed(receipt, Failure.LATE)

    def hang_up(self) -> None:
        """A client does."""
        if self._calls:
            receipt = self.world.draw.choice(sorted(self._calls))
            call = self._calls.pop(receipt)
            self._handle(Aborted(receipt))
            node = self.world.at(call.unit.worker)
            if node is not None and node.unit == call.unit:
                node.soon(lambda: node.abort(call.turn_id))

    def _failed(self, receipt: Receipt, failure: Failure) -> None:
        call = self._calls.pop(receipt, None)
        if call is not None:
            self._go(call.session, call.prompt, Failed(receipt, failure))

    def _look_up(self, session: SessionId) -> None:
        def said(outcomes: list[Any]) -> None:
            found = outcomes[0]
            if isinstance(found, SessionIs) and not self.is_dead:
                self.told(Claimed(session, found.owner, found.epoch, found.version))

        network, asked = self.world.network, FindSession(session, self._seen)
        network.send(
            lambda: self.world.directory.arrives(
                [asked], lambda outcomes: network.send(lambda: said(outcomes))
            )
        )

    # -- what the state is told ----------------------------------------------------------------

    def told(self, event: Any) -> None:
        if isinstance(event, Claimed):
            self._seen = later(self._seen, event.epoch)
        self._handle(event)

    def _handle(self, event: Event) -> Any:
        effect = self.state.handle(event, self.now())  # type: ignore[call-overload]
        if isinstance(effect, LetGo):
            self.releasing.let_go(effect)
        return effect

    # -- moves that are ordered by hand --------------------------------------------------------

    def order(self, session: SessionId, target: WorkerId) -> None:
        """Have the target take the session over from who owns it, as far as is known here."""
        known = self.state.sessions.get(session)
        source = None if known is None else known.owner
        workers = [one for one in self.state.fleet if one.id == target]
        if source is None or not workers or workers[0].unit is None:
            return
        address = self.lines.read_by(workers[0], source, self.worker_names)
        line = self.lines.of(target)
        if address is None or line is None:
            return

        async def move(unit: RoutingUnit) -> None:
            said = await line.ask(Take(session, address), TAKE_S)
            reason = said.reason.value if isinstance(said, Reject) else type(said).__name__
            self.world.counts[f"ordered: {reason}"] += 1
            if isinstance(said, SessionTaken):
                self.told(TakenOver(session, unit, source.id, said.tokens))
                if said.epoch is not None:
                    self.told(Claimed(session, unit, said.epoch, said.version))

        task = self.world.loop.create_task(move(workers[0].unit))
        self.ordered[task] = None
        task.add_done_callback(self.ordered.pop)

    def call_off(self) -> None:
        """Order no more what was ordered last."""
        for task in self.ordered:
            task.cancel()
