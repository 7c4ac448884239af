"""NodeState: a worker's brain. Events with `now` in, effects out; no clock, thread or tensor.

Owns the life of every turn between its arrival and the session's next one:

    arrival -> plan -> restore -> start -> run -> seal -> idle -> spill -> gone
    `------- Restores -------'    `- the engine -'  `--- Spills ---'

`cache` owns what is on the device, the store what is below; the node asks both and tells the
engine. The runtime performs effects and hands what came of them to `handle`: in any order, late,
or twice; every answer is matched by its errand and one that nobody waits for changes nothing.
The simulator runs this very class.
"""

from __future__ import annotations

from itertools import count

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Resume
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.chains import Chains
from ownerserve.node.events import (
    Arrived,
    Effect,
    Ended,
    Event,
    Fetched,
    Filled,
    Found,
    Gone,
    Kept,
    NotFetched,
    NotKept,
    RestoreReport,
    Start,
    Tick,
)
from ownerserve.node.prefetches import Prefetches
from ownerserve.node.records import RecordNames
from ownerserve.node.restores import Restores
from ownerserve.node.settings import NodeSettings
from ownerserve.node.spills import Spills
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.base import CheckpointPolicy
from ownerserve.plan.swa.turn_end import TurnEnd


class NodeState:
    """See the module. One for each routing unit; called on the thread that owns the cache."""

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
        self.cache = cache
        self.costs = costs
        self._errands = count(1)
        self._chains = Chains(cache.layout.block_tokens, block_bytes=cache.tree.block_bytes)
        self.restores = Restores(cache, names, planner=planner, costs=costs, settings=settings)
        self.spills = Spills(
            cache, names, self._chains, policy=policy or TurnEnd(), settings=settings
        )
        self.prefetches = Prefetches(
            cache,
            self._chains,
            costs,
            model=planner.model,
            abilities=planner.abilities,
            settings=settings,
        )
        self._turns: dict[TurnId, SessionId | None] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`."""
        return [effect for effect in self._handle(event, now) if not self._is_ours(effect)]

    def _is_ours(self, effect: Effect) -> bool:
        """The `Start` of a prefetch: nobody runs it."""
        if not isinstance(effect, Start) or not self.prefetches.landed(effect.turn_id):
            return False
        report = self.restores.reports.pop(effect.turn_id)
        self.spills.counts[f"prefetch_{report.outcome}"] += 1
        return True

    def _handle(self, event: Event, now: float) -> list[Effect]:
        restores = self.restores
        match event:
            case Arrived():
                return self._arrived(event, now)
            case Found():
                if self.spills.found(event):
                    return []
                return list(restores.found(event, errand=self._next_errand(), now=now))
            case Fetched():
                return list(restores.fetched(event))
            case NotFetched():
                return list(restores.not_fetched(event, errand=self._next_errand(), now=now))
            case Filled():
                return list(restores.filled(event, now))
            case Ended():
                self._ended(event, now)
            case Gone(turn_id):
                session_id = self._turns.pop(turn_id, None)
                if session_id is not None:
                    self.spills.stayed(session_id, now)
                return list(restores.gone(turn_id, now))
            case Kept(errand):
                self.spills.landed(errand, "kept")
            case NotKept(errand):
                self.spills.landed(errand, "not_kept")
            case Tick():
                effects = restores.overdue(now) + self.spills.tick(now, self._next_errand)
                for wish in self.prefetches.due(now):
                    effects += self._restore(wish, now)
                return effects
        return []

    def resume(self, tokens: Packed) -> Resume | None:
        """How the engine should begin a turn of `tokens`, now that it does."""
        return self.restores.resume(tokens)

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """What came of a turn's restore; handed out once, after its `Start`."""
        return self.restores.reports.pop(turn_id, None)

    def next_due(self) -> float | None:
        """When a `Tick` has something to do; None: only an event can bring work."""
        instants = (
            self.restores.next_deadline(),
            self.spills.next_due(),
            self.prefetches.next_due(),
        )
        return min((at for at in instants if at is not None), default=None)

    def check(self) -> None:
        """Raise InvariantViolated unless the cache's books and the node's own agree."""
        self.cache.check()
        reserved, on_hold = self.cache.ingest.counts()
        if on_hold:
            raise InvariantViolated(f"invariant 1: {on_hold} blocks on hold, no writer is lost")
        if reserved and not len(self.restores):
            raise InvariantViolated("invariant 1: reserved blocks, and no turn waits for them")

    def _arrived(self, event: Arrived, now: float) -> list[Effect]:
        self._turns[event.turn_id] = event.session_id
        if event.session_id is not None:
            self.spills.resumed(event.session_id, now)
            self.prefetches.resumed(event.session_id)
        return self._restore(event, now)

    def _restore(self, event: Arrived, now: float) -> list[Effect]:
        return list(self.restores.arrived(event, self._chains, errand=self._next_errand(), now=now))

    def _ended(self, event: Ended, now: float) -> None:
        session_id = self._turns.pop(event.turn_id, None)
        if session_id is not None:
            self.spills.ended(session_id, event, now)
            self.prefetches.ended(session_id, self.spills.gaps.get(session_id), now)

    def _next_errand(self) -> int:
        return next(self._errands)
