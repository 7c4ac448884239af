"""Prefetches: idle sessions whose state was evicted, and when it is worth bringing it back. Pure.

    turn ends ── state evicted, in the store ── T_prefetch ── restored, for nobody yet ── next turn

T_prefetch comes from the session's own gaps and the price of a load (plan.gaps). Nothing is
evicted for it: what may not be needed takes only room that is free.
"""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.chains import Chains
from ownerserve.node.events import Arrived
from ownerserve.node.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.gaps import GapCosts, GapStats, can_prefetch, prefetch_after_s
from ownerserve.plan.inputs import Abilities, ModelState, Tier

SHARES = (0.1, 0.25, 0.5, 0.75)
LOOK_AGAIN_S = 1.0
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
        settings: NodeSettings,
    ) -> None:
        self._cache = cache
        self._chains = chains
        self._costs = costs
        self._model = model
        self._settings = settings
        self._is_able = can_prefetch(abilities)
        self._due: dict[SessionId, tuple[float, float]] = {}  # (idle since, look at)
        self._under_way: set[TurnId] = set()

    def ended(self, session_id: SessionId, gaps: GapStats | None, now: float) -> None:
        """The session is idle; its state may be gone before it comes back."""
        self._due.pop(session_id, None)
        if not self._is_able or gaps is None:
            return
        after_s = self._best_instant(session_id, gaps)
        if after_s is not None:
            self._due[session_id] = (now, now + after_s)

    def resumed(self, session_id: SessionId) -> None:
        """The session is back by itself."""
        self._due.pop(session_id, None)

    def due(self, now: float) -> list[Arrived]:
        """Restores to begin now, as turns that nobody will run."""
        wishes = []
        for session_id in [s for s, (_, due_s) in self._due.items() if due_s <= now]:
            since_s, due_s = self._due.pop(session_id)
            tokens = self._missing(session_id)
            if tokens is None:  # all there: look again, ever more rarely
                later_s = now + max(due_s - since_s, LOOK_AGAIN_S)
                if later_s < since_s + DEFAULT_TTL_S:
                    self._due[session_id] = (since_s, later_s)
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
        return min((due_s for _, due_s in self._due.values()), default=None)

    def _best_instant(self, session_id: SessionId, gaps: GapStats) -> float | None:
        """Seconds after the turn's end; None when loading on demand is as good."""
        session = self._cache.sessions.get(session_id)
        if session is None:
            return None
        count = round(self._model.range_bytes_per_token * session.tokens) + self._model.point_bytes
        load_ms = self._costs.load(Tier.DISK, count).ms
        costs = GapCosts(hold_ms_per_s=self._settings.hold_ms_per_s, spill_ms=0.0, load_ms=load_ms)
        return prefetch_after_s(gaps.gap(), costs, SHARES)

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
