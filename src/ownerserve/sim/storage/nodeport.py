"""A simulated worker's node port performs a NodeState's effects on simulated media.

    Copy    device ── PCIe ── room in the store? ── the home's medium ── Kept | NotKept
    Find    ── the catalogue's latency ── Found
    Fetch   ── the tiers' media ── PCIe ── Fetched: all of it, or NotFetched
    Tick    when the node says that something is due, never more often than `TICK_S`

The production counterpart is node.runtime: same effects, same answers, same measurements to the
cost model. Owns operations under way. Decides nothing, and must never look into a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Resume
from ownerserve.cache.pressure import Checkpoint
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import Packed
from ownerserve.kv.units import GIB
from ownerserve.node.retention.policy import policy_of
from ownerserve.node.runtime.refill import RefillGauge
from ownerserve.node.state import NodeState
from ownerserve.node.vocabulary.events import (
    DropOperation,
    Effect,
    Event,
    Fetch,
    Fetched,
    Fill,
    Filled,
    FindRecords,
    Forget,
    Kept,
    Locate,
    Located,
    NotFetched,
    NotKept,
    OperationId,
    RecordsFound,
    RecordsLost,
    Remember,
    Remembered,
    RestoreReport,
    Start,
    StoreCopy,
    Tick,
)
from ownerserve.node.vocabulary.records import Tip
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.events import Loaded
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Coefficients
from ownerserve.plan.inputs import FULL_ABILITIES, Abilities
from ownerserve.plan.restore import Planner
from ownerserve.sim.storage.layout import UnitModel, unit_defaults, unit_policy
from ownerserve.sim.storage.store import AlreadyKept, PendingRead, Room, SimStore, TierCopy
from ownerserve.sim.storage.stored import LostRecords, held_units, located
from ownerserve.sim.storage.unit_names import UnitNames
from ownerserve.sim.timeline.links import Ways, carry
from ownerserve.sim.timeline.media import Pipe, in_series
from ownerserve.store.format.model import MissReason

TICK = Tick()
TICK_S = 0.01
"""A worker looks at its node between two engine steps: about so often."""
RECORD_TOKENS = 2048
"""Tokens of a range record by default, as 8 blocks of an engine with pages of 256: a session of
110,000 tokens is 54 of each component."""
COPY_BYTES_A_TICK = 2 * GIB
COPIES_IN_FLIGHT = 128
"""The link and the drive decide how fast a session is copied; what is copied in one tick is one
transfer and one answer here, so that a long session costs a few events."""

At = Callable[[float, Callable[[float], None]], object]
Started = Callable[[TurnId, float], None]
ToCheckpoint = Callable[[Sequence[TurnId]], None]


def unit_settings(model: UnitModel, **changes: float | None) -> NodeSettings:
    """Return a node's settings in units: records of about RECORD_TOKENS tokens, copies as fast as
    the link. `changes` are NodeSettings' own fields."""
    blocks = max(1, RECORD_TOKENS // model.block_tokens)
    base = {"record_blocks": blocks, "copy_bytes_a_tick": COPY_BYTES_A_TICK}
    base["copies_in_flight"] = COPIES_IN_FLIGHT
    return NodeSettings(**{**base, **changes})  # type: ignore[arg-type]


def make_node(
    cache: HeteroCache,
    model: UnitModel,
    prefill: Coefficients,
    *,
    store: SimStore,
    pcie: Ways,
    settings: NodeSettings | None = None,
    policy: str = "turn-end",
    abilities: Abilities = FULL_ABILITIES,
) -> NodeState:
    """Make a node in units over `cache`. `prefill` is priced in tokens (a pace's); `policy` names a
    checkpoint policy as `ownerserve worker` does, periods in tokens."""
    if cache.layout != model.layout:
        raise InvalidInput("cache", "has another layout than the model", "make both from one model")
    media = {t.tier: in_series((t.reads.medium, pcie.back.medium)) for t in store.tiers}
    settings = settings or unit_settings(model)
    settings = msgspec.structs.replace(settings, below=frozenset(media))
    if media:
        # Stored records are priced as loads from disk; without one, from the tier that keeps them.
        media.setdefault(Tier.DISK, media[store.tiers[-1].tier])
    label = "the simulator's own media and pace"
    prices = unit_defaults(prefill, media, unit_tokens=model.unit_tokens, label=label)
    costs = CostModel(prices)
    names = UnitNames(model.identity(), model.layout, engine="sim/1", blocks=settings.record_blocks)
    return NodeState(
        cache,
        names,
        planner=Planner(model.state, abilities),
        costs=costs,
        settings=settings,
        policy=policy_of(
            unit_policy(policy, model.unit_tokens) if media else "zero", model.state, costs
        ),
    )


class SimNode:
    """The node of one simulated worker performs its NodeState's effects on simulated media. `at`
    asks for a call at an instant (sim.timeline.heap)."""

    def __init__(
        self,
        state: NodeState,
        store: SimStore,
        pcie: Ways,
        *,
        at: At,
        started: Started,
        checkpoint: ToCheckpoint | None = None,
    ) -> None:
        """`started(turn, now)` is called once for each turn that arrived, also from within
        `handle`; `checkpoint(turns)` names turns to snapshot at their next boundary."""
        self.inventory = state.inventory
        self.refill = RefillGauge(state.cache, state.inventory, state.costs)
        self.state = state
        self.store = store
        self.pcie = pcie
        self.is_alive = True
        self._at = at
        self._started = started
        self._checkpoint = checkpoint
        self._asked: set[OperationId] = set()
        self._fetched: dict[OperationId, tuple[bytes, ...]] = {}
        self._slot_bytes = {c.name: c.slot_bytes for c in state.cache.layout.components}
        self._armed_s: float | None = None
        self._ticked_s = 0.0
        self._file: dict[SessionId, Tip] = {}
        self._losses = LostRecords(store)

    def goes_on(self, file: dict[SessionId, Tip], now: float) -> None:
        """Take the session file of a former life, which this one goes on writing."""
        self._file = file
        if file:
            self.handle(Remembered(tuple(file.values())), now)

    # -- the worker's side ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Tell the node's state, and do what it wants."""
        effects = self.state.handle(event, now)
        if effects:
            self._perform(effects, now)
        if self.store.tiers:
            self._arm(now)

    def resume(self, tokens: Packed) -> Resume | None:
        """Return how the engine should begin a turn of `tokens`, now that it does."""
        return self.state.resume(tokens)

    def checkpoints(self, start: int, prompt_end: int) -> frozenset[int]:
        """Return the positions, in units, at which a prefill should keep state."""
        return self.state.checkpoints.during(start, prompt_end)

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """Return what came of a turn's restore, once; None when there was none."""
        return self.state.report(turn_id)

    def stored_units(self, prompt: Packed) -> int:
        """Return how much of a prompt, in units, lies in this worker's host memory, up to where one
        could go on."""
        if not self.store.tiers:
            return 0
        return held_units(self.state.names, self.state.chains.peek(prompt), self.store)

    def compute_ms(self, units: int, known: int) -> float:
        """Return what computing so many units behind `known` ones takes, by this node's prices."""
        return self.state.costs.prefill(units, known).ms

    def look(self, now: float) -> None:
        """See that a tick comes when one is due; the cache's owner calls this when it took or gave
        room.

        With no tier there is nothing to come for by itself: it is looked at here, between two
        steps, as by a worker's loop.
        """
        if self.store.tiers:
            self._arm(now)
            return
        due_s = self.state.next_due()
        if due_s is not None and due_s <= now:
            self._perform(self.state.handle(TICK, now), now)

    def _arm(self, now: float) -> None:
        armed_s, soonest_s = self._armed_s, self._ticked_s + TICK_S
        if soonest_s < now:
            soonest_s = now
        if armed_s is not None and armed_s <= soonest_s:
            return
        due_s = self.state.next_due()
        if due_s is None:
            return
        if due_s < soonest_s:
            due_s = soonest_s
        if armed_s is None or due_s < armed_s:
            self._armed_s = due_s
            self._at(due_s, self._tick)

    def die(self) -> None:
        """End this life with all that it had in memory. Its drives keep what they have."""
        self.is_alive = False
        self.store.lose_volatile()

    def check(self) -> None:
        """Raise InvariantViolated unless the node's books and its tiers' agree.

        Room that is reserved while no restore is under way is a transfer's.
        """
        if len(self.state.restores) or not sum(self.state.cache.ingest.counts()):
            self.state.check()
        self.store.check()

    # -- effects -------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now != self._armed_s or not self.is_alive:
            return  # an earlier one came instead
        self._armed_s, self._ticked_s = None, now
        if lost := self._losses.take():
            self._perform(self.state.handle(RecordsLost(lost), now), now)
        self.handle(TICK, now)

    def _perform(self, effects: Iterable[Effect], now: float) -> None:
        copies: list[StoreCopy] = []
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case Start(turn_id):
                    self._started(turn_id, now)
                case StoreCopy():
                    copies.append(effect)
                case FindRecords(operation_id):
                    self._asked.add(operation_id)
                    self._at(now + self.store.lookup_s, partial(self._found, effect))
                case Fetch(operation_id):
                    self._asked.add(operation_id)
                    self._fetch(effect, now)
                case Fill(operation_id):
                    filled = Filled(operation_id, self._fetched.pop(operation_id))
                    waiting.extend(self.state.handle(filled, now))
                case DropOperation(operation_id):
                    self._asked.discard(operation_id)
                    self._fetched.pop(operation_id, None)
                case Checkpoint(turns) if self._checkpoint is not None:
                    self._checkpoint(turns)
                case Locate(operation_id):
                    self._asked.add(operation_id)
                    self._at(now + self.store.lookup_s, partial(self._locate, effect))
                case Remember(tip):
                    self._file[tip.session_id] = tip
                case Forget(session_id):
                    self._file.pop(session_id, None)
        if copies:
            self._copy(copies, now)

    def _take(self, operation_id: OperationId) -> bool:
        """Return whether somebody still waits for this operation, and count it as over."""
        if not self.is_alive or operation_id not in self._asked:
            return False
        self._asked.remove(operation_id)
        return True

    def _found(self, find: FindRecords, now: float) -> None:
        if self._take(find.operation_id):
            held = self.store.find(find.ids)
            inside = self.store.inside(find.boundaries)
            if inside:
                held |= self.store.find(item.meta.id for item in inside)
            self.handle(RecordsFound(find.operation_id, held, inside), now)

    def _locate(self, locate: Locate, now: float) -> None:
        if self._take(locate.operation_id):
            self.handle(Located(locate.operation_id, located(self.store, locate.ids)), now)

    # -- fetching ------------------------------------------------------------------------------

    def _fetch(self, fetch: Fetch, now: float) -> None:
        reading = self.store.read(fetch.wants, now, deadline_s=fetch.deadline_s)
        if not isinstance(reading, PendingRead):
            reason, id_ = reading
            late = reason is MissReason.DEADLINE
            when_s = max(now, fetch.deadline_s) if late else now + self.store.lookup_s
            self._at(when_s, partial(self._missed, NotFetched(fetch.operation_id, reason, id_)))
            return
        reading.coming.then(self._at, partial(self._read, fetch, reading), now)
        self._start_moves(now)

    def _missed(self, answer: NotFetched, now: float) -> None:
        if self._take(answer.operation_id):
            self.handle(answer, now)

    def _read(self, fetch: Fetch, reading: PendingRead, now: float) -> None:
        """Send what has come to host memory on to the device."""
        if self.is_alive and fetch.operation_id in self._asked:
            landed = partial(self._landed, fetch, reading)
            carry(self.pcie.back, reading.bytes, now).then(self._at, landed, now)

    def _landed(self, fetch: Fetch, reading: PendingRead, now: float) -> None:
        if not self._take(fetch.operation_id):
            return
        if reading.tier is not None:
            self._learn(Loaded(reading.tier, reading.bytes, 1e3 * self._took_s(reading, now)))
        self._fetched[fetch.operation_id] = tuple(want.id for want in fetch.wants)
        self.handle(Fetched(fetch.operation_id), now)

    def _took_s(self, reading: PendingRead, now: float) -> float:
        """Return what a worker would measure: of its own media what they took once they began, of a
        host's, where neighbours move bytes that it knows nothing of, all the time that passed."""
        way = self.pcie.back
        if isinstance(way, Pipe):
            return reading.service_s + way.service_s(reading.bytes)
        return now - reading.began_s

    def _learn(self, seen: Loaded) -> None:
        if seen.ms > 0.0:
            self.state.costs.observe(seen)

    # -- copying -------------------------------------------------------------------------------

    def _copy(self, copies: Sequence[StoreCopy], now: float) -> None:
        """Send all copies of one tick together; they are answered together."""
        count = sum(len(copy.slots) * self._slot_bytes[copy.component] for copy in copies)
        carry(self.pcie.out, count, now).then(self._at, partial(self._reserve, copies), now)

    def _reserve(self, copies: Sequence[StoreCopy], now: float) -> None:
        if not self.is_alive:
            return
        rooms: list[Room] = []
        written: list[OperationId] = []
        answers: list[Event] = []
        for copy in copies:
            size = len(copy.slots) * self._slot_bytes[copy.component]
            room = self.store.reserve(copy.meta, size, cost_ms=copy.restore_cost_ms, now_s=now)
            if isinstance(room, Room):
                rooms.append(room)
                written.append(copy.operation_id)
            elif isinstance(room, AlreadyKept):
                answers.append(Kept(copy.operation_id))
            else:
                answers.append(NotKept(copy.operation_id))
        if rooms:
            kept = partial(self._written, rooms, written)
            self.store.write(rooms, now).then(self._at, kept, now)
        self._answer(answers, now)

    def _written(
        self, rooms: Sequence[Room], operation_ids: Sequence[OperationId], now: float
    ) -> None:
        if self.is_alive:
            self.store.commit(rooms, now)
            self._answer([Kept(operation_id) for operation_id in operation_ids], now)
            self._start_moves(now)

    def _answer(self, answers: Sequence[Event], now: float) -> None:
        for answer in answers:
            if effects := self.state.handle(answer, now):
                self._perform(effects, now)
        if answers:
            self._arm(now)

    def _start_moves(self, now: float) -> None:
        started = self.store.start_moves(now)
        if started is not None:
            coming, moves = started
            coming.then(self._at, partial(self._moved, moves), now)

    def _moved(self, moves: Sequence[TierCopy], now: float) -> None:
        if self.is_alive:
            self.store.moved(moves, now)
            self._start_moves(now)
