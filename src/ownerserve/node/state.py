"""A `NodeState` makes a worker's decisions: events with `now` in, effects out; no clock, thread or
tensor.

Owns the life of every turn between its arrival and the session's next one:

    arrival -> room -> plan -> restore -> start -> run -> seal -> idle -> spill -> gone
    `- RoomQueue --'`---- Restores ----'  `- the engine -'  `- IdleSpills -'

`cache` owns what is on the device, the store what is below; the node asks both and tells the
engine. The runtime performs effects and hands what came of them to `handle`: in any order, late,
or twice; every answer is matched by its operation and one that nobody waits for changes nothing.
The simulator runs this very class. With no tier below the device (NodeSettings.below) nothing is
waited for, planned or copied: a turn starts when it arrives, and what is left of it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Resume, WriterKind
from ownerserve.cache.policies.base import PolicyPrices
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.admission import RoomQueue
from ownerserve.node.ownership.inventory import FOUND_LESS, Inventory, OnDevice, Residency
from ownerserve.node.restore.coming import ComingSessions
from ownerserve.node.restore.restores import Restores
from ownerserve.node.restore.sources import OwnDevice, Walks
from ownerserve.node.retention.leaving import SessionsLeaving
from ownerserve.node.retention.policy import Checkpoints, Prefetches, SessionGaps
from ownerserve.node.retention.record_value import KEPT_IN, RecordValue
from ownerserve.node.retention.spills import IdleSpills, PressureRelief, RecordCopies
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import (
    CameIn,
    Effect,
    Event,
    Fetched,
    Filled,
    Kept,
    Located,
    NotFetched,
    NotKept,
    PrefixCame,
    PutAway,
    RecordsFound,
    RecordsLost,
    Remembered,
    RestoreOutcome,
    RestoreReport,
    SessionCame,
    SessionComing,
    SessionLeaves,
    SessionOver,
    Start,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import RecordNames, tip_of
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.benefit import eviction_weights
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnEnd, TurnSpan

NOBODY = TurnId("")
REPRICE_S = 10.0
"""How often what was measured reaches the cache's order and the checkpoint policy."""


class NodeState:
    """A `NodeState` is the decision maker of one routing unit; called on the thread that owns the
    cache."""

    def __init__(
        self,
        cache: HeteroCache,
        names: RecordNames,
        *,
        planner: Planner,
        costs: CostModel,
        settings: NodeSettings | None = None,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        settings = settings or NodeSettings()
        value = RecordValue(names, planner, costs)
        self._has_tiers = bool(settings.below)
        self.order_tokens = settings.order_tokens
        self.cache = cache
        self.costs = costs
        self.operations = Operations()
        self.chains = Chains.of(names)
        self.walks = Walks(cache)
        self.restores = Restores(
            OwnDevice(cache, self.walks),
            names,
            self.operations,
            planner=planner,
            costs=costs,
            settings=settings,
        )
        self.checkpoints = Checkpoints(policy or TurnEnd(), planner.model, costs)
        self.gaps = SessionGaps(value, planner.abilities, settings)
        copies = RecordCopies(names, value, self.operations, self.checkpoints)
        self.idle_spills = IdleSpills(
            cache, self.chains, self.operations, copies=copies, gaps=self.gaps, settings=settings
        )
        held, holds = self.restores.held_blocks, self.idle_spills.holds
        self.room_queue = RoomQueue(cache, self.walks, held, holds=holds, settings=settings)
        self.pressure_relief = PressureRelief(
            cache,
            self.chains,
            self.operations,
            copies=copies,
            idle_spills=self.idle_spills,
            settings=settings,
        )
        self.prefetches = Prefetches(
            cache,
            self.chains,
            costs,
            model=planner.model,
            abilities=planner.abilities,
            gaps=self.gaps,
        )
        self.names, self.coming = names, ComingSessions()
        self.leaving = SessionsLeaving(self.idle_spills)
        self.inventory = Inventory()
        self.on_device = OnDevice(cache, self.inventory, digest_at=self.chains.digest_at)
        can_replay = planner.abilities.can_replay and planner.model.exact_replay_tokens is not None
        self.residency = Residency(names, self.inventory, self.operations, can_replay=can_replay)
        self.residency.told = cache.residents.stored
        self._repriced_s = -REPRICE_S
        self._turns: dict[TurnId, SessionId | None] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event and return the effects that it asks for, in order."""
        if not self._has_tiers:
            return self._handle_on_device(event, now)
        effects = self._handle(event, now)
        if self.idle_spills.over:
            self._tell_copied(now)
        if self.residency.writes:
            effects += self.residency.to_file()
        effects += self.leaving.over()
        if not effects:
            return effects
        for effect in effects:
            if isinstance(effect, Start):
                self._learn(effect.turn_id, now)
        return [told for effect in effects for told in self._for_engine(effect)]

    def _tell_copied(self, now: float) -> None:
        """Have the store looked at for the tips of sessions all of whose copies were answered
        for."""
        over, self.idle_spills.over = self.idle_spills.over, []
        size = self.cache.layout.packed_block_bytes
        for batch in over:
            tip = tip_of(
                self.names,
                batch.session_id,
                len(batch.tokens) // size,
                digests=batch.digests,
                points=batch.unstored,
            )
            self.residency.copied(tip, now)

    def _learn(self, turn_id: TurnId, now: float) -> None:
        session_id = self._turns.get(turn_id)
        report = self.restores.reports.get(turn_id)
        if report is not None and turn_id in self._turns:
            if report.outcome is RestoreOutcome.LOADED:
                self.room_queue.loaded(turn_id, now)
            elif report.outcome in FOUND_LESS and session_id is not None:
                self.residency.missed(session_id, now)
            ends = self.idle_spills.turn_ends(session_id) if session_id is not None else frozenset()
            self.checkpoints.restored(report, ends)

    def _for_engine(self, effect: Effect) -> Sequence[Effect]:
        """Return what the engine is to do: nothing at the `Start` of a prefetch, which nobody runs,
        how that ended is counted; at that of a session that comes, tell who waits for it."""
        if not isinstance(effect, Start):
            return (effect,)
        turn_id = effect.turn_id
        if self.coming.landed(turn_id):
            report = self.restores.reports.pop(turn_id)
            return (CameIn(turn_id, report.outcome, report.loaded_bytes),)
        if not self.prefetches.landed(turn_id):
            return (effect,)
        report = self.restores.reports.pop(turn_id)
        self.idle_spills.counts[f"prefetch_{report.outcome}"] += 1
        return ()

    def _handle(self, event: Event, now: float) -> list[Effect]:
        restores = self.restores
        match event:
            case Tick():
                return self._tick(now)
            case (
                Kept()
                | Located()
                | RecordsFound()
                | NotKept()
                | Fetched()
                | NotFetched()
                | Filled()
            ):
                effects = self.operations.complete(event, now)
                if restores.between:
                    effects += self._next_parts(now)
                return effects
            case TurnArrived():
                return self._arrived(event, now)
            case TurnEnded():
                self._ended(event, now)
            case SessionComing():
                return self._coming(event, now)
            case SessionCame():
                self._came(event, now)
            case PrefixCame(replica, hashed):
                self.chains.hashed(hashed.tokens, replica, hashed)
                self.on_device.ended(replica)
            case SessionLeaves(leaves):
                self.leaving.begin(leaves)
            case TurnGone(turn_id):
                session_id = self._turns.pop(turn_id, None)
                self.coming.landed(turn_id)
                self.room_queue.over(turn_id)
                self.walks.over(turn_id)
                if session_id is not None:
                    self.idle_spills.stayed(session_id, now)
                return list(restores.gone(turn_id, now))
            case SessionOver(session_id):
                self.idle_spills.holds.let(session_id)
                self.residency.forget(session_id)
                self.inventory.forget(session_id)
            case RecordsLost():
                self.residency.lost(event, now)
            case Remembered(tips):
                self.residency.remembered(tips, now)
        return []

    def _handle_on_device(self, event: Event, now: float) -> list[Effect]:
        """Handle an event where no tier lies below the device: turns start at once, and what of
        their prompts is resident goes last until they are over. Nothing is copied."""
        match event:
            case TurnArrived(turn_id, session_id, tokens):
                self._turns[turn_id] = session_id
                self.walks.arrived(event)
                self.walks.retain(turn_id, tokens, now)
                return [Start(turn_id)]
            case TurnEnded(turn_id):
                self.walks.over(turn_id)
                session_id = self._turns.pop(turn_id, None)
                if session_id is not None:
                    self.on_device.ended(session_id)
            case TurnGone(turn_id):
                self._turns.pop(turn_id, None)
                self.walks.over(turn_id)
            case SessionOver(session_id):
                self.inventory.forget(session_id)
            case SessionLeaves(leaves):
                return [PutAway(leaves)]
            case Tick():
                self.cache.sessions.expire(now)
                self.cache.lends.expire(now)
                effects = self.pressure_relief.tick(now)
                self.on_device.tick()
                return effects
        return []

    def _tick(self, now: float) -> list[Effect]:
        if now - self._repriced_s >= REPRICE_S:
            self._reprice(now)
        self.cache.sessions.expire(now)
        self.cache.lends.expire(now)
        effects = self.restores.overdue(now) + self._let_on(now) + self._make_way(now)
        effects += self.pressure_relief.tick(now)
        effects += self.idle_spills.tick(now)
        if self.idle_spills.over:
            self._tell_copied(now)
        effects += self.residency.tick(now)
        self.on_device.tick()
        for prefetch in self.prefetches.due(now):
            if len(self.room_queue):  # what is here comes before what may come
                self.prefetches.landed(prefetch.turn_id)
            else:
                effects += self._restore(prefetch, now)
        return effects

    def _reprice(self, now: float) -> None:
        """Give the measured prices to the cache's eviction order and to the checkpoint policy."""
        self._repriced_s = now
        weights = eviction_weights(self.costs.prices(), copies=KEPT_IN)
        per_byte = weights.reload_ms_per_byte
        reload = None if per_byte is None else per_byte / weights.ms_per_token
        self.cache.policy.reprice(PolicyPrices(weights.context_tokens, reload))
        self.checkpoints.reprice()

    def resume(self, tokens: Packed) -> Resume | None:
        """Decide how the engine should begin a turn of `tokens`, now that it does; None: as the
        cache does by itself."""
        count = len(tokens) // TOKEN_BYTES
        return self.restores.resume(NOBODY, tokens, count) if self._has_tiers else None

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """Take the report of the turn's restore, after its `Start`; None where there is none, or it
        was taken."""
        return self.restores.reports.pop(turn_id, None)

    def next_due(self) -> float | None:
        """Return the instant at which a `Tick` has something to do; 0: now; None: only an event can
        bring work."""
        if not self._has_tiers:
            is_due = self.cache.pressure.is_due or self.on_device.is_due
            if is_due:
                return 0.0
            ends = (self.cache.sessions.next_due(), self.cache.lends.next_due())
            return min((at for at in ends if at is not None), default=None)
        if self.on_device.is_due:
            return 0.0
        soonest_s = inf
        for next_due in (  # what is most often due now is asked first
            self.idle_spills.next_due,
            self.pressure_relief.next_due,
            self.residency.next_due,
            self.prefetches.next_due,
            self.restores.next_deadline,
            self.cache.sessions.next_due,
            self.cache.lends.next_due,
            self.room_queue.next_due,
        ):
            due_s = next_due()
            if due_s is not None and due_s < soonest_s:
                soonest_s = due_s
                if not due_s:
                    break
        return None if soonest_s == inf else soonest_s

    @property
    def is_busy(self) -> bool:
        """`is_busy` tells whether anything is being copied to the store, or looked for there to be
        told."""
        return self.idle_spills.is_busy or self.pressure_relief.is_busy or self.residency.is_busy

    def check(self) -> None:
        """Raise InvariantViolated unless the cache's books and the node's own agree."""
        self.cache.check()
        self.pressure_relief.check()
        self.idle_spills.holds.check()
        self.inventory.check()
        reserved, _ = self.cache.ingest.counts()
        on_hold = self.cache.ingest.on_hold(WriterKind.STORE)
        waited_for = {*self.restores.unquiet.values()}
        if on_hold != waited_for:
            raise InvariantViolated(f"invariant 1: on hold {on_hold}, waited for {waited_for}")
        if reserved and not len(self.restores):
            raise InvariantViolated("invariant 1: reserved blocks, and no turn waits for them")

    def _arrived(self, event: TurnArrived, now: float) -> list[Effect]:
        self._turns[event.turn_id] = event.session_id
        self.walks.arrived(event)
        if event.parent is not None:
            self.idle_spills.forks.add(event.parent)
        if event.session_id is not None:
            self.idle_spills.resumed(event.session_id, now)
            self.prefetches.resumed(event.session_id)
            if event.hashed is not None:
                self.chains.hashed(event.tokens, event.session_id, event.hashed)
        self.room_queue.arrived(event, now)
        return self._let_on(now) + self._make_way(now)

    def _let_on(self, now: float) -> list[Effect]:
        """Let the turns on for which there is room: what they are brought next is."""
        effects: list[Effect] = []
        for event in self.room_queue.let_on(now):
            effects += self._restore(event, now)
        return effects

    def _next_parts(self, now: float) -> list[Effect]:
        """Have the turns for which a part has come wait for the next one's room, and let on who has
        it."""
        between, self.restores.between = self.restores.between, []
        effects: list[Effect] = []
        for event in between:
            if event.turn_id in self._turns:
                self.room_queue.back(event.turn_id, now)
            else:
                effects += self._unlined_on(event, now)
        return effects + self._let_on(now)

    def _unlined_on(self, event: TurnArrived, now: float) -> list[Effect]:
        """Bring the next part of what no turn waits for, or end it with those it has: of a prefetch
        into room that is free, of a session that comes into what can be had, while nobody waits."""
        occupancy = self.cache.occupancy
        is_coming = event.turn_id in self.coming
        room = occupancy.obtainable_blocks() if is_coming else occupancy.blocks.free
        if not len(self.room_queue) and room >= (self.room_queue.part_blocks or 0):
            return self._restore(event, now)
        return list(self.restores.stop(event.turn_id, now))

    def _restore(self, event: TurnArrived, now: float) -> list[Effect]:
        return list(self.restores.arrived(event, self.chains, now=now))

    def _coming(self, event: SessionComing, now: float) -> list[Effect]:
        """Begin to bring a session that moves here, unless turns wait for room: what is here comes
        before."""
        if len(self.room_queue):
            return [CameIn(event.turn_id, RestoreOutcome.NO_ROOM)]
        arrival = self.coming.begin(event)
        return list(self.restores.arrived(arrival, self.chains, now=now))

    def _make_way(self, now: float) -> list[Effect]:
        """Give up the sessions that come where a turn waits for room, or would in the next step:
        what is here comes before."""
        room_queue, occupancy = self.room_queue, self.cache.occupancy
        has_room = occupancy.obtainable_blocks() >= room_queue.step_blocks
        if not self.coming.turn_ids or (has_room and not len(room_queue)):
            return []
        coming = self.coming.turn_ids
        return [effect for one in coming for effect in self.restores.stop(one, now)]

    def _came(self, event: SessionCame, now: float) -> None:
        """Take a session in as one whose turn has ended here, and has left its state at its last
        block."""
        session_id, hashed = event.session_id, event.hashed
        self.chains.hashed(hashed.tokens, session_id, hashed)
        depth, block = len(hashed.digests), self.cache.layout.block_tokens
        tokens = depth * block
        points = self.checkpoints.ended(TurnSpan(tokens - 1, tokens, tokens, block))
        self._idle(session_id, points=points, ends=frozenset({depth}), now=now)

    def _ended(self, event: TurnEnded, now: float) -> None:
        session_id = self._turns.pop(event.turn_id, None)
        self.room_queue.over(event.turn_id)
        self.walks.over(event.turn_id)
        if session_id is not None:
            block = self.cache.layout.block_tokens
            span = TurnSpan(event.restored, event.prompt, event.tokens, block)
            points = self.checkpoints.ended(span)
            ends = frozenset(at // block for at in span.turn_ends())
            self._idle(session_id, points=points, ends=ends, now=now)

    def _idle(
        self, session_id: SessionId, *, points: set[int], ends: frozenset[int], now: float
    ) -> None:
        """Note that the session is idle: its state at the depths `points` is wanted in the
        store."""
        self.idle_spills.ended(session_id, points=points, ends=ends, now=now)
        if len(self.room_queue) and session_id not in self._turns.values():  # its room goes next
            self.idle_spills.put_away(session_id)
            self.idle_spills.holds.hold(session_id, now)
        self.prefetches.ended(session_id, now)
        self.on_device.ended(session_id)
