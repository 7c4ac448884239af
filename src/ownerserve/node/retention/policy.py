"""Policies decide which of a session's state is stored, and when it is copied or loaded back. Pure.

    turn ends ── which points: Checkpoints
      `── T_spill: copied ── evicted ── T_prefetch: restored, for nobody yet ── next turn

`Checkpoints` says of which boundaries point state is kept. The device takes snapshots where the
engine can (the prompt's last boundaries, prefill chunk ends that the policy names, the output's
last boundary); a turn's end says which of them are stored. Both instants come from the session's
own gaps and the price of a load (plan.gaps): `SessionGaps` owns gap statistics by session,
`Prefetches` whose state is to be looked at and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.cache.sessions import restorable_tokens
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.retention.record_value import RecordValue
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import RestoreOutcome, RestoreReport, TurnArrived
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.gaps import Gap, GapCosts, GapStats, can_prefetch, plan_gap, prefetch_after_s
from ownerserve.plan.inputs import Abilities, ModelState
from ownerserve.plan.swa.accounting import WriteAccount
from ownerserve.plan.swa.adaptive import Adaptive, Economics
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.plan.swa.checkpoints import (
    Branched,
    CheckpointPolicy,
    Full,
    Periodic,
    Produced,
    Resumed,
    TurnEnd,
    TurnSpan,
    Zero,
)
from ownerserve.store.format.model import ArtifactKind, Meta

SIMPLE: dict[str, Callable[[], CheckpointPolicy]] = {
    "full": Full,
    "zero": Zero,
    "turn-end": TurnEnd,
}


def policy_of(text: str, model: ModelState, costs: CostModel) -> CheckpointPolicy:
    """Return the checkpoint policy that `text` names: full, periodic:N (tokens), zero, turn-end,
    branches or adaptive. Raises InvalidInput for other words."""
    name, _, period = text.partition(":")
    if name in SIMPLE and not period:
        return SIMPLE[name]()
    if name == "branches" and not period:
        # A lead is kept by `Saves` alone, where the engine owns its blocks.
        cost = PointCost(model.point_bytes, model.range_bytes_per_token, has_lead=False)
        return Branches(cost)
    if name == "adaptive" and not period:
        return Adaptive(economics(model, costs))
    if name == "periodic" and period.isdigit() and int(period):
        return Periodic(int(period))
    mend = "use full, periodic:N (tokens), branches, zero, turn-end or adaptive"
    raise InvalidInput("checkpoints", repr(text), mend)


def economics(model: ModelState, costs: CostModel) -> Economics:
    """Return what a checkpoint costs and saves, by the present prices."""
    return Economics(
        point_bytes=model.point_bytes,
        ms_per_token=max(costs.prices().prefill.b_ms, 1e-6),
        load_ms=costs.load(Tier.DISK, model.point_bytes).ms,
        replay_tokens=model.exact_replay_tokens,
    )


class Checkpoints:
    """`Checkpoints` holds one node's checkpoint policy, feeds it, and keeps the account of the
    bytes that storing writes and reads."""

    def __init__(self, policy: CheckpointPolicy, model: ModelState, costs: CostModel) -> None:
        self.policy = policy
        self.account = WriteAccount()
        self.spilled_slots: Counter[str] = Counter()
        self._model = model
        self._costs = costs

    def during(self, start: int, prompt_end: int) -> frozenset[int]:
        """Return the positions, in tokens, at which the engine should take a snapshot as the prompt
        passes them."""
        span = TurnSpan(start, prompt_end, prompt_end, self._model.block_tokens)
        return frozenset(self.policy.checkpoints(span)).union(self.policy.chunk_ends(span))

    def ended(self, span: TurnSpan) -> set[int]:
        """Return the depths, in blocks, whose point state is to be stored, now that the turn is
        over; the policy learns of the turn."""
        self.policy.observe(Produced(span))
        kept = (*self.policy.checkpoints(span), *self.policy.chunk_ends(span))
        return {at // span.block_tokens for at in kept}

    def restored(self, report: RestoreReport, turn_ends: frozenset[int]) -> None:
        """Teach the policy where a restore went on: at the session's own turn end, or at a branch
        from inside. `turn_ends` are depths in blocks."""
        if report.outcome is not RestoreOutcome.LOADED or report.plan is None:
            return
        way = report.plan.chosen
        is_loaded = any(step.action is RestoreAction.LOAD_POINT for step in way.steps)
        if is_loaded or way.position // self._model.block_tokens in turn_ends:
            self.policy.observe(Resumed(way.position))
        else:
            self.policy.observe(Branched(way.position))
        self.account.read_point(report.loaded_point_bytes)

    def kept(self, meta: Meta, payload_bytes: int) -> None:
        """Count a record that was written."""
        self.spilled_slots[meta.component] += meta.units
        if meta.kind is ArtifactKind.RANGE:
            self.account.wrote_range(payload_bytes)
        else:
            self.account.wrote_points(payload_bytes, records=1)

    def reprice(self) -> None:
        """Give an adaptive policy the present prices."""
        if isinstance(self.policy, Adaptive):
            self.policy.reprice(economics(self._model, self._costs))


# ---- when


MIN_GAPS = 3
"""Below this a session's next gap is anybody's guess."""
PLANS_KEPT = 4096
"""Instants by rounded gap and load time; begun anew when there are more."""
SHARES = (0.1, 0.25, 0.5, 0.75)
"""A prefetch is timed to be done just as one of these shares of the gaps end."""
SPILL_AFTER_S = 0.25
"""For sessions whose gaps are not known: longer than the quickest tool, shorter than most."""


Plans = dict[tuple[Gap, float], float | None]
"""Seconds after a turn's end, by the session's gaps and what a load takes in ms."""


class SessionGaps:
    """`SessionGaps` keeps gap statistics by session and the spill and prefetch times that follow
    from them."""

    def __init__(self, value: RecordValue, abilities: Abilities, settings: NodeSettings) -> None:
        self._value = value
        self._abilities = abilities
        self._settings = settings
        self._stats: dict[SessionId, GapStats] = {}
        self._spill_after: Plans = {}
        self._prefetch_after: Plans = {}

    def observe(self, session_id: SessionId, gap_s: float) -> None:
        """Learn that the session came back after `gap_s` seconds."""
        self._stats.setdefault(session_id, GapStats()).observe(max(0.0, gap_s))

    def known(self, session_id: SessionId) -> GapStats | None:
        """Return the session's gap statistics, once it has MIN_GAPS gaps; else None."""
        stats = self._stats.get(session_id)
        return stats if stats is not None and stats.count >= MIN_GAPS else None

    def forget(self, session_id: SessionId) -> None:
        """Forget the session's gaps: it was not seen for long."""
        self._stats.pop(session_id, None)

    def spill_after_s(self, session_id: SessionId, depth: int) -> float:
        """Return how many seconds after its turn's end a session of `depth` blocks is copied.

        A session that is expected back before a copy pays is copied when its soft reference ends,
        or when room is short.
        """
        if self._settings.spill_after_s is not None:
            return self._settings.spill_after_s
        stats = self.known(session_id)
        if stats is None:
            return SPILL_AFTER_S
        key = (stats.gap().rounded(), _two_digits(self._value.load_ms(depth)))
        if key not in self._spill_after:
            gap, load_ms = key
            # Writing is priced as loading: nobody waits for it, and it is the same bytes.
            plan = plan_gap(gap, self._costs(load_ms, load_ms), self._abilities)
            _keep(self._spill_after, key, plan.spill_after_s)
        after_s = self._spill_after[key]
        return DEFAULT_TTL_S if after_s is None else after_s

    def prefetch_after_s(self, session_id: SessionId, load_ms: float) -> float | None:
        """Return how many seconds after its turn's end to bring back state that is gone by then and
        takes `load_ms` to load; None when loading on demand is as good, or the session's gaps are
        not known."""
        stats = self.known(session_id)
        if stats is None:
            return None
        key = (stats.gap().rounded(), _two_digits(load_ms))
        if key not in self._prefetch_after:
            gap, load_ms = key
            _keep(
                self._prefetch_after, key, prefetch_after_s(gap, self._costs(0.0, load_ms), SHARES)
            )
        return self._prefetch_after[key]

    def _costs(self, spill_ms: float, load_ms: float) -> GapCosts:
        price = self._settings.hold_ms_per_s
        return GapCosts(hold_ms_per_s=price, spill_ms=spill_ms, load_ms=load_ms)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _keep(plans: Plans, key: tuple[Gap, float], after_s: float | None) -> None:
    if len(plans) >= PLANS_KEPT:
        plans.clear()
    plans[key] = after_s


# ---- prefetches


LOOK_AGAIN_S = 1.0
SMALL_QUEUE = 64
NOT_DUE = (0.0, -1.0)
"""What stands for a session that is not to be looked at: no instant is its."""
ANY_TOKEN = bytes(TOKEN_BYTES)
"""Stands for whatever the next turn adds: a restore leaves at least one token to compute."""


class Prefetches:
    """`Prefetches` watches idle sessions whose state may be evicted, and says when it is worth
    bringing back.

    Nothing is evicted for a prefetch: what may not be needed takes only room that is free.
    """

    def __init__(
        self,
        cache: HeteroCache,
        chains: Chains,
        costs: CostModel,
        *,
        model: ModelState,
        abilities: Abilities,
        gaps: SessionGaps,
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
        """Plan when to look at the session, which is idle now: its state may be gone before it
        comes back."""
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
        """Plan nothing more for the session, which is back by itself."""
        self._due.pop(session_id, None)

    def due(self, now: float) -> list[TurnArrived]:
        """Return the restores to begin now, as turns that nobody will run."""
        arrivals = []
        while self._queue and self._queue[0][0] <= now:
            due_s, session_id = heappop(self._queue)
            since_s, at_s = self._due.get(session_id, NOT_DUE)
            if at_s != due_s:
                continue
            del self._due[session_id]
            tokens = self._missing(session_id)
            if tokens is None:  # all there: look again, ever more rarely
                later_s = now + max(due_s - since_s, LOOK_AGAIN_S)
                if later_s < since_s + DEFAULT_TTL_S:
                    self._wait(session_id, since_s, later_s)
            else:
                turn_id = TurnId(f"prefetch/{session_id}")
                self._under_way.add(turn_id)
                arrivals.append(TurnArrived(turn_id, None, tokens))
        return arrivals

    def landed(self, turn_id: TurnId) -> bool:
        """Return whether the turn is a prefetch under way, so that there is nothing to run, and end
        it."""
        if turn_id not in self._under_way:
            return False
        self._under_way.remove(turn_id)
        return True

    def next_due(self) -> float | None:
        """Return the instant at which `due` has something to do; None: nothing is planned."""
        queue, due = self._queue, self._due
        while queue and due.get(queue[0][1], NOT_DUE)[1] != queue[0][0]:
            heappop(queue)
        return queue[0][0] if queue else None

    def _missing(self, session_id: SessionId) -> Packed | None:
        """Return what to fetch, the session's tokens, when something of them is gone and fits into
        free room; else None."""
        session = self._cache.sessions.get(session_id)
        if session is None or session.running:
            return None
        restorable = restorable_tokens(session, self._cache.layout)
        missing = self._chains.known_tokens(session_id) - restorable
        if missing <= 0:
            return None
        free = self._cache.occupancy.blocks.free * self._model.block_tokens
        if missing > free or TurnId(f"prefetch/{session_id}") in self._under_way:
            return None
        return self._chains.tokens(session_id) + ANY_TOKEN
