"""Prefetches: idle sessions whose state was evicted, and when it is worth bringing it back. Pure.

    turn ends ── state evicted, in the store ── T_prefetch ── restored, for nobody yet ── next turn

T_prefetch comes from the session's own gaps and the price of a load (plan.gaps). Nothing is
evicted for it: what may not be needed takes only room that is free.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.retention.gaps import Gaps
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import Arrived
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.gaps import can_prefetch
from ownerserve.plan.inputs import Abilities, ModelState

LOOK_AGAIN_S = 1.0
SMALL_QUEUE = 64
ANY_TOKEN = bytes(TOKEN_BYTES)
"""Stands for whatever the next turn adds: a restore leaves at least one token to compute."""


class Prefetches:
    """When to fetch back for whom."""

    def __init__(
        self,
        cache: HeteroCache,
        chains: Chains,
        costs: CostModel,
        *,
        model: ModelState,
        abilities: Abilities,
        gaps: Gaps,
    ) -> None:
        self._cache = cache
        self._chains = chains
        self._costs = costs
        self._model = model
        self._gaps = gaps
        self._is_able = can_prefetch(abilities)
        self._due: dict[SessionId, tuple[float, float]] = {}  # (idle since, look at)
        self._queue: list[tuple[float, SessionId]] = []  # of _due; entries may be out of date
        self._under_way: set[TurnId] = set()

    def ended(self, session_id: SessionId, now: float) -> None:
        """The session is idle; its state may be gone before it comes back."""
        self._due.pop(session_id, None)
        session = self._cache.sessions.get(session_id)
        if not self._is_able or session is None:
            return
        count = round(self._model.range_bytes_per_token * session.tokens) + self._model.point_bytes
        after_s = self._gaps.prefetch_after_s(session_id, self._costs.load(Tier.DISK, count).ms)
        if after_s is not None:
            self._wait(session_id, now, now + after_s)

    def _wait(self, session_id: SessionId, since_s: float, due_s: float) -> None:
        self._due[session_id] = (since_s, due_s)
        heappush(self._queue, (due_s, session_id))
        if len(self._queue) > 2 * len(self._due) + SMALL_QUEUE:
            self._queue = [(at_s, name) for name, (_, at_s) in self._due.items()]
            heapify(self._queue)

    def resumed(self, session_id: SessionId) -> None:
        """The session is back by itself."""
        self._due.pop(session_id, None)

    def due(self, now: float) -> list[Arrived]:
        """Restores to begin now, as turns that nobody will run."""
        wishes = []
        while (due_s := self.next_due()) is not None and due_s <= now:
            _, session_id = heappop(self._queue)
            since_s, _ = self._due.pop(session_id)
            tokens = self._missing(session_id)
            if tokens is None:  # all there: look again, ever more rarely
                later_s = now + max(due_s - since_s, LOOK_AGAIN_S)
                if later_s < since_s + DEFAULT_TTL_S:
                    self._wait(session_id, since_s, later_s)
            else:
                turn_id = TurnId(f"prefetch/{session_id}")
                self._under_way.add(turn_id)
                wishes.append(Arrived(turn_id, None, tokens))
        return wishes

    def landed(self, turn_id: TurnId) -> bool:
        """Whether a `Start` was one of ours: there is nothing to run."""
        if turn_id not in self._under_way:
            return False
        self._under_way.remove(turn_id)
        return True

    def next_due(self) -> float | None:
        """When `due` has something to do."""
        queue, due = self._queue, self._due
        while queue and due.get(queue[0][1], (0.0, -1.0))[1] != queue[0][0]:
            heappop(queue)
        return queue[0][0] if queue else None

    def _missing(self, session_id: SessionId) -> Packed | None:
        """What to fetch: the session's tokens, when something of them is gone and fits."""
        status = self._cache.sessions.status(session_id)
        tokens = self._chains.tokens(session_id)
        if status is None or status.running_turns or not tokens:
            return None
        count = len(tokens) // TOKEN_BYTES
        missing = count - status.restorable_tokens
        free = self._cache.rooms.blocks.free * self._model.block_tokens
        if missing <= 0 or missing > free or TurnId(f"prefetch/{session_id}") in self._under_way:
            return None
        return tokens + ANY_TOKEN
