"""One life of a simulated worker.

    real   cache, scheduler, node (restores), orders, peers, prefills, lends, both sides of transfer
    not    the loop's thread, the store (there is none), the model (toy.py), movers, the network

Its engine does what `StepLoop` and `NodeRuntime` do of it, in one call a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import (
    RequestArrival,
    RequestRejected,
    SchedulerLimits,
    StepPlan,
)
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import RpcAnswer, RpcRequest
from ownerserve.node.state import NodeState
from ownerserve.node.transfers.landings import Landings
from ownerserve.node.transfers.lenders import Lenders
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.prefills import OrderedPrompt, Prefills, PrefillTimes
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.node.transfers.turn_lends import TurnLends
from ownerserve.node.vocabulary.chains import PromptPrefix, prefix_of
from ownerserve.node.vocabulary.engine_port import LayersTold
from ownerserve.node.vocabulary.events import (
    CallOffPrefill,
    DropOperation,
    Effect,
    Event,
    Fetch,
    Fetched,
    Fill,
    Filled,
    FindRecords,
    Locate,
    Located,
    NotFetched,
    NotKept,
    PrefillOrder,
    RecordsFound,
    Start,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import FULL_ABILITIES, Backlog, ModelState
from ownerserve.plan.restore import Planner
from ownerserve.store.format.model import ReadHit, ReadMiss, ReadOutcome, ReadPart
from ownerserve.transfer.movers.digests import Xxh3
from tests.support.node.lending_nodes import LAYOUT, NAMES, SECTIONS, B
from tests.support.node.schedules.clock import Fiber
from tests.support.node.schedules.mover import SimRoads
from tests.support.node.schedules.network import SimPort
from tests.support.node.schedules.service import SimService
from tests.support.node.toy_memory import ToyMemory

if TYPE_CHECKING:
    from tests.support.node.schedules.schedule import Schedule

RUNNING, WAITING = 3, 12
PART_TOKENS = NAMES.blocks * B
"""A record, the least that a part can be."""
TICK_S, WELL_TICK_S = 0.1, 0.5
TOKEN_MS = 6.0
PRICES = Defaults(
    "schedules",
    Coefficients(1.0, TOKEN_MS, 0.0),
    dict.fromkeys((Tier.HOST, Tier.DISK, Tier.REMOTE, Tier.PEER), Medium(1.0, 1e6)),
)
MODEL = ModelState(
    layers=3,
    block_tokens=B,
    range_bytes_per_token=float(SECTIONS["dense"].unit_bytes / B),
    point_bytes=SECTIONS["swa"].unit_bytes,
)


class LiveTurn(msgspec.Struct, eq=False):
    """A turn that is here; `said` so far. One for another worker has no answer."""

    prompt: PromptPrefix
    answer: int
    said: list[int] = []
    restored: int = 0


class SimNode:
    """See the module."""

    def __init__(self, world: Schedule, name: str, life: int, *, slots: int) -> None:
        self.world, self.name = world, name
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(life))
        self.is_dead, self.frozen_until_s = False, 0.0
        self.cache = HeteroCache(LAYOUT, {"dense": slots, "swa": slots}, RUNNING)
        self.memory = ToyMemory(slots)
        self.state = NodeState(
            self.cache,
            NAMES,
            planner=Planner(MODEL, FULL_ABILITIES),
            costs=CostModel(PRICES),
            settings=NodeSettings(record_blocks=NAMES.blocks, part_tokens=PART_TOKENS),
        )
        limits = SchedulerLimits(
            chunk_tokens=2 * B,
            prefill_tokens_a_step=3 * B,
            max_running=RUNNING,
            max_waiting=WAITING,
            sequence_tokens=slots * B,
        )
        self.scheduler = Scheduler(
            self.cache,
            limits,
            resume_of=self.state.resume,
            checkpoints_of=self.state.checkpoints.during,
        )
        self.lending = Lending(self.cache, NAMES, self.state.chains, regions=self.memory.regions)
        self.lending.address = f"{name}:1"
        self._transfers()
        self.port = SimPort(self)
        self.turns: dict[TurnId, LiveTurn] = {}
        self._begun = 0
        self._parts: dict[int, tuple[ReadPart, ...]] = {}
        self._asked: dict[int, FindRecords | Fetch] = {}
        self._is_stepping = False
        self._arrivals_ended = 0
        self._tick()

    def _transfers(self) -> None:
        loop = self.world.loop
        lenders = Lenders(self.lending)
        source = SourceSide(self.unit, lenders, self.between, digests=Xxh3(), loop=loop)
        who = cast(Any, self)  # lines say by it whose they are
        target = TargetSide(self.unit, Landings(SECTIONS), SimRoads(self), key=who, loop=loop)
        self.service = SimService(self, source, target)
        self.peers = Peers(cast(TransferService, self.service), SECTIONS, B)
        if self.world.draw.random() < 0.7:
            self.peers.orders.own = self.address
        turns = TurnLends(self.lending, self.cache, NAMES, tell=source.tell, layers=self)
        self.turn_lends = self.lending.turns = turns
        self.prefills = Prefills(self.cache, turns, self)
        self.lending.ended = self.prefills.lend_ended

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        """Its engine tells steps alone."""

    def unwatch_layers(self, turn_id: TurnId) -> None: ...

    @property
    def address(self) -> LenderAddress:
        return LenderAddress(self.unit, f"tcp://{self.name}:1")

    @property
    def is_frozen(self) -> bool:
        return self.world.loop.time() < self.frozen_until_s

    # -- threads -------------------------------------------------------------------------------

    def soon(self, action: Callable[[], None]) -> None:
        """Do it on one of this process's threads: not once it is dead, not while it is frozen."""

        def act() -> None:
            if self.is_dead:
                return
            if self.is_frozen:
                self.world.loop.call_at(self.frozen_until_s, act)
                return
            self.world.acting = self
            action()

        self.world.loop.call_soon(act)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.loop.call_later(delay_s, self.soon, action)

    def between(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it between two steps."""
        done: Future[Any] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(work())
                self._kick()

        self.later(self.world.pause_s(), run)
        return done

    def stands(self, ticket: int) -> bool:
        """What a signed road's server asks after a read."""
        stands = self.lending.stands(ticket)
        if stands:
            self.service.source.was_read(ticket)
        return stands

    def answer(self, request: RpcRequest) -> Future[RpcAnswer]:
        """Answer what has nothing to do with transfers."""
        raise AssertionError(f"nobody asks {request}")

    def kill(self) -> None:
        """End this life: nothing of it is done any more."""
        self.is_dead = True
        self.service.source.close()
        self.service.target.close()

    # -- turns ---------------------------------------------------------------------------------

    def run(
        self,
        turn_id: TurnId,
        prompt: PromptPrefix,
        *,
        answer: int,
        session_id: SessionId | None = None,
        begins: int = 0,
        lender: LenderAddress | None = None,
        decode_from: LenderAddress | None = None,
    ) -> WorkerRefusal | None:
        """Take a turn in; return why not."""
        load = self.scheduler.load()
        arrived = self.scheduler.arrive(
            RequestArrival(
                request_id=turn_id,
                turn_ids=(turn_id,),
                prompt=prompt,
                max_new_tokens=answer,
                session_id=session_id,
                begins=begins,
            )
        )
        if isinstance(arrived, RequestRejected):
            return arrived.reason
        self.turns[turn_id] = LiveTurn(prompt, answer)
        self.scheduler.hold(turn_id)
        order = None
        if decode_from is not None:
            order = PrefillOrder(decode_from, pack(prompt.plain(0, prompt.count)))
        event = TurnArrived(
            turn_id,
            session_id,
            prompt.tokens,
            Backlog(load.pending_prefill_tokens, load.waiting),
            hashed=prompt.hashed,
            lender=lender,
            order=order,
        )
        self.handle(event)
        self._kick()
        return None

    def abort(self, turn_id: TurnId) -> None:
        """Give a turn up; one that has ended is no error."""
        self.scheduler.abort(turn_id, self._now)
        if self.turns.pop(turn_id, None) is not None:
            self.handle(TurnGone(turn_id))
            self.state.report(turn_id)
        self.prefills.over(turn_id)
        self._kick()

    @property
    def _now(self) -> float:
        return self.world.loop.time()

    # -- node.transfers.prefills.PrefillEngine -------------------------------------------------

    def begin_prefill(self, ordered: OrderedPrompt) -> TurnId | WorkerRefusal:
        self._begun += 1
        turn_id = TurnId(f"prefill-{self._begun}")
        refusal = self.run(
            turn_id,
            ordered.prefix,
            answer=0,
            begins=ordered.whole_tokens,
            lender=ordered.source,
            session_id=None,
        )
        return turn_id if refusal is None else refusal

    def abort_prefill(self, turn_id: TurnId) -> None:
        self.abort(turn_id)

    def prefill_ms(self, tokens: int, known: int) -> PrefillTimes:
        pending = self.scheduler.load().pending_prefill_tokens
        return PrefillTimes(TOKEN_MS * pending, TOKEN_MS * tokens)

    # -- the engine ----------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._now
        self.handle(Tick())
        self.cache.lends.expire(now)
        self.prefills.poll(now)
        self._kick()
        self.later(WELL_TICK_S if self.world.is_well else TICK_S, self._tick)

    def _kick(self) -> None:
        if not self._is_stepping and self.scheduler.has_work:
            self._is_stepping = True
            self.later(self.world.step_s(), self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.plan(self._now)
        self._announce(plan)
        self.memory.apply(plan.effects)
        tokens = self._compute(plan)
        ended = [turn_id for turn_id in tokens if self._speak(turn_id, tokens[turn_id])]
        self.memory.apply(self.scheduler.step_done(tokens, ended, now=self._now))
        for turn_id in ended:
            self._over(turn_id)
        for chunk in plan.chunks:
            self.prefills.computed(chunk.turn_id, chunk.start + len(chunk.tokens))
        for turn_id in [chunk.turn_id for chunk in plan.chunks if chunk.ends_turn]:
            self.prefills.over(turn_id)
            self._over(turn_id)
        self._kick()

    def _announce(self, plan: StepPlan) -> None:
        for one in plan.admitted:
            self.prefills.began(one.turn_id, max(one.restored, one.floor))
            if not one.again:
                self.turns[one.turn_id].restored = one.restored
        for request_id in plan.failed:
            turn_id = TurnId(request_id)
            del self.turns[turn_id]
            self.handle(TurnGone(turn_id))
            self.state.report(turn_id)
            self.prefills.over(turn_id)
            self.world.failed(turn_id)
        self.world.counts["preempted"] += len(plan.preempted)

    def _compute(self, plan: StepPlan) -> dict[TurnId, int]:
        tokens = dict[TurnId, int]()
        for chunk in plan.chunks:
            scores = self.memory.compute(
                chunk.table, chunk.tokens, chunk.start, write_floor=chunk.write_floor
            )
            tokens.update(dict.fromkeys(chunk.sample_for, int(scores.argmax())))
        for row in plan.rows:
            scores = self.memory.compute(row.table, [row.token], row.position)
            tokens[row.turn_id] = int(scores.argmax())
        return tokens

    def _speak(self, turn_id: TurnId, token: int) -> bool:
        turn = self.turns[turn_id]
        turn.said.append(token)
        return len(turn.said) == turn.answer

    def _over(self, turn_id: TurnId) -> None:
        turn = self.turns.pop(turn_id)
        tokens = turn.prompt.count + max(0, len(turn.said) - 1)
        self.handle(TurnEnded(turn_id, turn.restored, turn.prompt.count, tokens))
        report = self.state.report(turn_id)
        if turn.answer:
            is_brought = report is not None and report.is_ordered
            self.world.answered(turn_id, turn.said, is_brought=is_brought)

    # -- what NodeRuntime does -----------------------------------------------------------------

    def handle(self, event: Event) -> None:
        effects: deque[Effect] = deque(self.state.handle(event, self._now))
        while effects:
            effects.extend(self._perform(effects.popleft()))
        if self._arrivals_ended != self.cache.ingest.ended:
            self._arrivals_ended = self.cache.ingest.ended
            self.scheduler.room_returned()

    def _perform(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Start(turn_id):
                self.scheduler.release(turn_id)
            case FindRecords(operation_id):
                self._asked[operation_id] = effect
                self.later(self.world.pause_s(), lambda: self._look(effect))
            case Fetch(operation_id):
                self.peers.expect(effect.wants, effect.turn_id, effect.computed)
                self._asked[operation_id] = effect
                self.later(self.world.pause_s(), lambda: self._fetch(effect))
            case DropOperation(operation_id):
                asked = self._asked.pop(operation_id, None)
                if isinstance(asked, Fetch):
                    self.peers.give_up(asked.wants)
                self._parts.pop(operation_id, None)
            case CallOffPrefill(turn_id):
                self.peers.call_off(turn_id)
            case Fill(operation_id, fillings):
                parts = self._parts.pop(operation_id)
                for one in fillings:
                    self.memory.write_slots(one.component, one.slots, parts[one.part].data)
                ids = tuple(part.meta.id for part in parts)
                return self.state.handle(Filled(operation_id, ids), self._now)
            case StoreCopy(operation_id):
                return self.state.handle(NotKept(operation_id), self._now)
            case Locate(operation_id):
                return self.state.handle(Located(operation_id, {}), self._now)
        return ()

    def _look(self, effect: FindRecords) -> None:
        """A look that was not dropped before it began; its tiers, which have nothing, are slow."""
        number = effect.operation_id
        if number not in self._asked:
            return
        if effect.peer is None:
            self._found(number, frozenset())
            return
        peer = effect.peer
        self.later(
            self.world.pause_s(),
            lambda: self._fiber(
                lambda: self.peers.look(peer), lambda found: self._found(number, found)
            ),
        )

    def _fiber(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        Fiber(self.world.loop, work, lambda came: self.soon(lambda: done(came)))

    def _found(self, number: int, found: frozenset[bytes]) -> None:
        if self._asked.pop(number, None) is not None:
            self.handle(RecordsFound(number, dict.fromkeys(found, Tier.PEER)))
            self._kick()

    def _fetch(self, effect: Fetch) -> None:
        if effect.operation_id in self._asked:
            self._fiber(
                lambda: self.peers.read(effect.wants),
                lambda came: self._fetched(effect.operation_id, came),
            )

    def _fetched(self, number: int, came: ReadOutcome) -> None:
        if self._asked.pop(number, None) is None:
            return
        match came:
            case ReadHit(parts):
                self._parts[number] = parts
                self.handle(Fetched(number))
            case ReadMiss(reason, id_):
                self.handle(NotFetched(number, reason, id_))
        self._kick()

    # -- the end -------------------------------------------------------------------------------

    def books(self) -> dict[str, int]:
        """What somebody has, or waits for."""
        source = self.service.source.state.counts()
        target = self.service.target.state.counts(self._now)
        return {
            "lends": len(self.cache.lends),
            "turns": len(self.turns) + len(self.cache.running),
            "restores": len(self.state.restores),
            "unquiet": len(self.state.restores.unquiet),
            "arriving blocks": sum(self.cache.ingest.counts()),
            "prompts": len(self.turn_lends),
            "orders": len(self.peers.orders),
            "flights": len(self.port.flights),
            "parts": len(self._parts),
            **{f"source {name}": source[name] for name in ("opening", "lends", "held")},
            **{f"target {name}": int(target[name]) for name in ("brings", "rooms", "reads")},
        }


def prompt_of(tokens: list[int]) -> PromptPrefix:
    return prefix_of(tokens, B)
