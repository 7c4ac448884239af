"""A gateway of a schedule: turns are sent where the router says, and sessions are ordered to move.

real   `RouterState`, `GapMoves`, `Moves`, `Releasing`, the lines to workers, workers' names
not    HTTP: a turn, its answer and a leg's end are calls; `TurnMoves`, whose orders are given by
       hand; probes; whom it asks for places (nobody)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ownerserve.directory.messages import FindSession, SessionIs
from ownerserve.gateway.moves import TAKE_S, Moves
from ownerserve.gateway.turn_moves import TAKE_S as TURN_S
from ownerserve.gateway.turns import Turns
from ownerserve.gateway.workers.rpc import Releasing, WorkerLines, WorkerNames
from ownerserve.kv.ids import SessionId, TurnId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, later
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
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
    MovedOn,
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
from tests.support.node.schedules.moving_node import Leg

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
MOVES = 0.5
"""How often a turn is ordered to move once its client has two tokens."""
POLICIES = ("ownerserve", "ear", "sticky", "least_load")


class Call(msgspec.Struct, eq=False):
    """A turn on its way, and the life that it was sent to; `told` is what its client has of the
    answer, which is to be a cold engine's; `target` where it was ordered to go on. A leg at the
    target has an id of its own."""

    session: SessionId
    prompt: list[int]
    turn_id: TurnId
    unit: RoutingUnit
    heard_s: float
    name: TurnId
    answer: list[int]
    told: list[int] = []
    begins: int = 0
    target: RoutingUnit | None = None
    is_refused: bool = False


class _Rollout:
    """No rollout is under way."""

    is_normal = True

    def arm_of(self, name: SessionId, tenant: object) -> Arm:
        return Arm.MAIN


class _Finder:
    """What `SessionFinder` is to a gateway's `Rests`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def owner_of(self, session: SessionId) -> RoutingUnit | None:
        found: asyncio.Future[SessionIs] = self._gateway.world.loop.create_future()
        self._gateway.find(session, lambda said: None if found.done() else found.set_result(said))
        try:
            said = await asyncio.wait_for(found, LOOK_UP_S)
        except TimeoutError:
            return None
        return said.owner if said.owner_live else None


class Gateway:
    """One life of it. To `Moves` it is its `Turns`."""

    def __init__(self, world: MovingWorld, number: int) -> None:
        self.world, self.number = world, number
        self.is_dead = False
        self.state = RouterState(make_policy(world.draw.choice(POLICIES)))
        self.rollout, self.finder = _Rollout(), _Finder(self)
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
            answer = self.world.answer_to(session)
            self._go(session, prompt, answer, Arrive(session, BYTES_A_TOKEN * len(prompt)))

    def _go(
        self, session: SessionId, prompt: list[int], answer: list[int], event: Arrive | Failed
    ) -> None:
        outcome = cast("Dispatch | Refuse", self._handle(event))
        if not isinstance(outcome, Dispatch):
            return None  # the client asks again
        node = cast("MovingNode | None", self.world.at(outcome.worker))
        unit = self.state.fleet[outcome.worker].unit
        if node is None or node.unit != unit:
            return self._go(session, prompt, answer, Failed(outcome.receipt, Failure.CONNECT))
        turn_id = self.world.new_turn()
        call = Call(session, prompt, turn_id, node.unit, self.now(), turn_id, answer)
        leg = self._leg(call, self.lines.lender_of(outcome.decision, self.worker_names))
        self._send(
            outcome.receipt,
            call,
            node,
            lambda: node.serve(turn_id, prompt, leg, answer=len(answer)),
        )
        return None

    def _leg(self, call: Call, lender: LenderAddress | None) -> Leg:
        known = self.state.sessions.get(call.session)
        epoch = None if known is None else known.epoch
        before = 0 if known is None or known.grant is None else known.grant.version
        return Leg(call.session, call.name, epoch, before, lender)

    def _send(
        self, receipt: Receipt, call: Call, node: MovingNode, serve: Callable[[], object]
    ) -> None:
        self._calls[receipt] = call

        def sent() -> None:
            refusal = serve()
            if refusal is None:
                self.world.sent(call.turn_id, call, self, receipt)
            else:
                self.soon(0.001, lambda: self._refused(receipt, node, refusal))

        self.world.loop.call_later(0.001, node.soon, sent)
        self.soon(PATIENCE_S, lambda: self._late(receipt, node))

    def _refused(self, receipt: Receipt, node: MovingNode, refusal: object) -> None:
        call = self._calls.get(receipt)
        if call is None or not call.begins:
            self._failed(receipt, Failure.REFUSED)
            return
        is_lost = refusal is WorkerRefusal.UNKNOWN_TURN and not node.is_dead
        self.world.require(not is_lost, f"{call.name} is not where it was sent, at {node.name}")
        self._breaks(receipt)

    def heard(self, receipt: Receipt, at: int, token: int, owner: OwnerIs | None) -> None:
        """One more token of an answer comes; as it begins, its worker says whose the session is."""
        call = self._calls.get(receipt)
        if call is None:
            return
        self.world.require(at == len(call.told), f"{call.name}: {at} behind {len(call.told)}")
        if at == call.begins:
            claimed = None
            if owner is not None:
                self._seen = later(self._seen, owner.epoch)
                claimed = Claimed(call.session, owner.unit, owner.epoch, owner.version or 0)
            self._handle(FirstByte(receipt, claimed=claimed))
        call.told.append(token)
        call.heard_s = self.now()
        if len(call.told) == call.begins + 2 and self.world.draw.random() < MOVES:
            self._order_turn(call)

    def answered(self, receipt: Receipt, last: int, owner: OwnerIs | None) -> None:
        """The answer is whole."""
        call = self._calls.get(receipt)
        if call is None:
            return
        self.heard(receipt, len(call.told), last, owner)
        del self._calls[receipt]
        asked = self._handle(Done(receipt, Usage(len(call.prompt), len(call.told), 0)))
        if isinstance(asked, AskRelease):
            self.releasing.ask(asked)
        self.world.done(call.session, call.prompt, call.told)

    def moved_on(self, receipt: Receipt, tokens: int) -> None:
        """The leg ends, since the turn goes on at its target."""
        call = self._calls.pop(receipt, None)
        if call is None:
            return
        self.world.require(tokens == len(call.told), f"{call.name}: {tokens}, not {call.told}")
        assert call.target is not None, "nobody ordered it"
        there = self.world.at(call.target.worker)  # another life refuses what this one did
        is_same = there is not None and there.unit == call.target
        self.world.require(not (call.is_refused and is_same), f"{call.name} moves all the same")
        outcome = self._handle(MovedOn(receipt, call.target))
        if not isinstance(outcome, Dispatch):
            self.world.counts["turns lost"] += 1
            return
        turn_id = self.world.new_turn()
        leg_call = msgspec.structs.replace(
            call,
            turn_id=turn_id,
            unit=call.target,
            heard_s=self.now(),
            begins=tokens,
            target=None,
            is_refused=False,
        )
        node = cast("MovingNode | None", self.world.at(outcome.worker))
        if node is None or node.unit != call.target:
            self._calls[outcome.receipt] = leg_call
            self._breaks(outcome.receipt)
            return
        leg = self._leg(call, None)
        self._send(outcome.receipt, leg_call, node, lambda: node.goes_on(turn_id, leg, tokens))

    def _late(self, receipt: Receipt, node: MovingNode) -> None:
        call = self._calls.get(receipt)
        if call is None:
            return
        left_s = call.heard_s + PATIENCE_S - self.now()
        if left_s > 0:
            self.soon(left_s, lambda: self._late(receipt, node))
            return
        node.soon(lambda: node.abort(call.turn_id))
        if call.told:
            self._breaks(receipt)
        else:
            self._failed(receipt, Failure.LATE)

    def _breaks(self, receipt: Receipt) -> None:
        """Its client hears that nobody goes on with its answer, and asks anew."""
        del self._calls[receipt]
        self.world.counts["turns lost"] += 1
        self._handle(Aborted(receipt))

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
            self._go(call.session, call.prompt, call.answer, Failed(receipt, failure))

    def _look_up(self, session: SessionId) -> None:
        def said(found: SessionIs) -> None:
            self.told(Claimed(session, found.owner, found.epoch, found.version))

        self.find(session, said)

    def find(self, session: SessionId, said: Callable[[SessionIs], None]) -> None:
        """Ask the directory for a session's record, if it has one: `said` hears of it."""

        def heard(outcomes: list[Any]) -> None:
            found = outcomes[0]
            if isinstance(found, SessionIs) and not self.is_dead:
                said(found)

        network, asked = self.world.network, FindSession(session, self._seen)
        network.send(
            lambda: self.world.directory.arrives(
                [asked], lambda outcomes: network.send(lambda: heard(outcomes))
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

    def _order_turn(self, call: Call) -> None:
        """Have a turn that is amid its answer go on elsewhere."""
        workers = {one.id: one for one in self.state.fleet}
        target = self.world.draw.choice(sorted(workers))
        if self.world.is_well or target == call.unit.worker or call.unit.worker not in workers:
            return
        here, there = workers[call.unit.worker], workers[target]
        source = self.lines.read_by(there, here, self.worker_names)
        reached = self.lines.read_by(here, there, self.worker_names)
        line, unit = self.lines.of(target), there.unit
        if source is None or reached is None or line is None or unit is None:
            return
        call.target = unit

        async def move() -> None:
            said = await line.ask(Take(call.session, source, call.name, reached), TURN_S)
            reason = said.reason.value if isinstance(said, Reject) else type(said).__name__
            self.world.counts[f"turn ordered: {reason}"] += 1
            call.is_refused = isinstance(said, Reject)

        self._keep(move())

    def _keep(self, moving: Coroutine[Any, Any, None]) -> None:
        task = self.world.loop.create_task(moving)
        self.ordered[task] = None
        task.add_done_callback(self.ordered.pop)

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

        self._keep(move(workers[0].unit))

    def call_off(self) -> None:
        """Order no more what was ordered last."""
        for task in self.ordered:
            task.cancel()
