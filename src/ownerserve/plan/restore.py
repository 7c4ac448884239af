"""The restore planner finds the cheapest way back for one turn, within what the engine can do.

    argmin over ways of   T_queue + T_load + T_recompute + T_stall + lambda * M_HBM

(seed 000 §2.6.6; terms as plan.outcome draws them). The search prices with plain floats and leaves
out what can't win. A shallower point computes more and loads less: the search begins where the two
balance and goes both ways, shallower until computing alone takes longer than the best way so far,
deeper until loading alone does.

When an estimate has been badly wrong lately the planner asks, for each such estimate, whether the
choice would change if it were off by its own mean error, up or down. If not, the price decides. If
so, the ways that come out on top in some case can't be told apart by price, and observables
decide among them: fewest tokens to compute (in steps of OBSERVABLE_STEP_TOKENS), then fewest bytes
to move, then the least work pending at the tiers used (seed 002 §4.3.2's argument for observable
load, applied where it is needed).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import Abilities, Exactness, ModelState, Point, RestoreQuery
from ownerserve.plan.load_cost import LoadPricer, RangeLoadCosts
from ownerserve.plan.options import (
    PREFILL_ALL,
    OptionPricer,
    RestoreOption,
    restore_options,
    stages,
)
from ownerserve.plan.outcome import Basis, Explanation, NotOffered, Priced, RestorePlan
from ownerserve.plan.rules import (
    device_hit,
    why_no_bounded_replay,
    why_no_replay,
    why_not_one_length,
)

OBSERVABLE_STEP_TOKENS = 512
"""Tokens to compute are compared in steps of this: within one, a pass takes about as long."""

PREFER_SEALED = 1e-9
"""At equal price (to rounding) sealed state is kept rather than computed anew."""


class Planner:
    """A planner is for one model on one engine, and holds no state between plans.

    `replay_tokens` is the exact replay length where replay may be offered at all, else None.
    """

    def __init__(self, model: ModelState, abilities: Abilities) -> None:
        self.model = model
        self.abilities = abilities
        self.stages = stages(model, abilities)
        may_replay = model.point_bytes > 0 and why_no_replay(model, abilities) is None
        self.replay_tokens = model.exact_replay_tokens if may_replay else None

    def plan(self, query: RestoreQuery, prices: Prices) -> RestorePlan:
        """Return the way to take."""
        search = _Search(self, query, prices)
        option = search.best()
        pricer = self._pricer(query, prices, search.load_pricer)
        if prices.untrusted:
            rivals = self._rivals(option, query, prices)
            if len(rivals) > 1:
                priced = [pricer.priced(rival) for rival in rivals]
                chosen = min(priced, key=lambda p: _observable(p, query))
                return RestorePlan(chosen, Basis.OBSERVABLES, search.prefill_ttft_ms)
        return RestorePlan(pricer.priced(option), Basis.COST, search.prefill_ttft_ms)

    def deeper(self, query: RestoreQuery, prices: Prices, *, than: int) -> Priced | None:
        """Return the cheapest way that keeps range state beyond position `than`, however little
        computing alone would take; None: there is none."""
        points = tuple(point for point in query.points if point.position > than)
        if not points:
            return None
        search = _Search(self, query, prices)
        option = search.best_through(points)
        if option is None:
            return None
        return self._pricer(query, prices, search.load_pricer).priced(option)

    def explain(self, query: RestoreQuery, prices: Prices) -> Explanation:
        """Return the same plan with every alternative priced and every omission explained. Slow."""
        load_pricer = LoadPricer(prices, self.abilities, query)
        covered = RangeLoadCosts(query.spans, load_pricer).covered
        pricer = self._pricer(query, prices, load_pricer)
        priced: list[Priced] = []
        omitted: list[NotOffered] = []
        for option in restore_options(
            self.model, self.abilities, query=query, covered=covered, load_pricer=load_pricer
        ):
            if isinstance(option, NotOffered):
                omitted.append(option)
            else:
                priced.append(pricer.priced(option))
        priced.sort(key=lambda p: p.terms.total_ms)
        return Explanation(self.plan(query, prices), tuple(priced), tuple(omitted))

    def _pricer(self, query: RestoreQuery, prices: Prices, load_pricer: LoadPricer) -> OptionPricer:
        return OptionPricer(
            self.model, self.abilities, query=query, prices=prices, load_pricer=load_pricer
        )

    def _rivals(
        self, option: RestoreOption, query: RestoreQuery, prices: Prices
    ) -> list[RestoreOption]:
        """Return `option`, and whatever would win if an untrusted estimate were off by its own
        error.
        """
        rivals = [option]
        for name, error_factor in prices.untrusted.items():
            for factor in (error_factor, 1.0 / error_factor):
                other = _Search(self, query, prices.scaled(name, factor)).best()
                if other not in rivals:
                    rivals.append(other)
        return rivals


def _observable(option: Priced, query: RestoreQuery) -> tuple[int, int, int]:
    """Return how a way ranks by what can be seen, without any price: the lowest is best."""
    used = {step.tier for step in option.steps if step.tier is not None}
    pending = sum(n for tier, n in query.backlog.tier_bytes.items() if tier in used)
    return (-(-option.computed_tokens // OBSERVABLE_STEP_TOKENS), option.moved_bytes, pending)


class _Search:
    """A search is that of one query. Prices are those of `options.OptionPricer`, inlined to plain
    floats.
    """

    def __init__(self, planner: Planner, query: RestoreQuery, prices: Prices) -> None:
        model, abilities = planner.model, planner.abilities
        self._model, self._query, self._prices = model, query, prices
        self.load_pricer = LoadPricer(prices, abilities, query)
        self._loads = RangeLoadCosts(query.spans, self.load_pricer)
        self._stages = planner.stages
        self._queue_ms = prices.queue_ms(query.backlog)
        self._load_from_ms = 0.0 if abilities.can_reserve else self._queue_ms
        self._hit = None if abilities.per_group_hit else device_hit(query)
        self._replay_tokens = planner.replay_tokens
        bounded = why_no_bounded_replay(model, abilities, query) is None
        self._bounded_tokens = model.bounded_replay_tokens if bounded else None
        # Going on *at* an earlier point computes the same tokens as a replay from it and loads less
        # range state; a replay only wins where it computes cheaper or shares memory that costs.
        cheaper = (
            prices.replay.b_ms < prices.prefill.b_ms or prices.replay.c_ms < prices.prefill.c_ms
        )
        self._resuming_dominates = not cheaper and query.hbm_ms_per_gib <= 0.0
        self.prefill_ttft_ms = inf
        self._best_ms = inf
        self._best = PREFILL_ALL
        self._points_ms: dict[tuple[Tier, int], float] = {}

    def best(self) -> RestoreOption:
        """Return the cheapest open way."""
        tokens, points = self._query.tokens, self._query.points
        queue_ms, ms_until = self._queue_ms, self._loads.ms_until
        prefill_ms = self._prices.prefill.ms(tokens, 0)
        self.prefill_ttft_ms = self._ttft_ms(0.0, prefill_ms)
        self._best_ms = self._total_ms(0.0, prefill_ms, 0) * (1.0 + PREFER_SEALED)
        deepest = min(tokens - 1, self._loads.covered)
        first = bisect_left(points, -deepest, key=lambda point: -point.position)
        if first == len(points):
            return self._best
        begin = self._balanced(first)
        for index in range(begin, len(points)):
            tail_ms = self._tail_ms(index)
            if queue_ms + tail_ms >= self._best_ms:
                break
            self._try(index, tail_ms, load_ms=ms_until(points[index].position))
        for index in range(begin - 1, first - 1, -1):
            load_ms = ms_until(points[index].position)
            if self._load_from_ms + load_ms >= self._best_ms:
                break
            self._try(index, self._tail_ms(index), load_ms=load_ms)
        return self._best

    def best_through(self, points: tuple[Point, ...]) -> RestoreOption | None:
        """Return the cheapest open way through one of `points`, the query's deepest; None: there is
        none."""
        deepest = min(self._query.tokens - 1, self._loads.covered)
        for index, point in enumerate(points):
            if point.position <= deepest:
                load_ms = self._loads.ms_until(point.position)
                self._try(index, self._tail_ms(index), load_ms=load_ms)
        return None if self._best is PREFILL_ALL else self._best

    def _point_ms(self, point: Point) -> float:
        """Return the ms that a point's state takes to load: most points of a query lie alike, and
        are priced once.
        """
        pieces = point.pieces
        if len(pieces) != 1 or pieces[0].ready_ms > 0.0:
            return self.load_pricer.point_ms(pieces)
        key = (pieces[0].tier, pieces[0].bytes)
        ms = self._points_ms.get(key)
        if ms is None:
            ms = self._points_ms[key] = self.load_pricer.point_ms(pieces)
        return ms

    def _balanced(self, first: int) -> int:
        """Return the deepest point from `first` on whose range load takes no longer than the
        compute behind it; found by halving, since loads shrink and tails grow.
        """
        points, lead_ms = self._query.points, self._queue_ms - self._load_from_ms

        def is_loaded_in_time(index: int) -> bool:
            return self._loads.ms_until(points[index].position) <= lead_ms + self._tail_ms(index)

        if is_loaded_in_time(first):
            return first
        return bisect_left(range(len(points)), 1, first, key=is_loaded_in_time)

    def _tail_ms(self, index: int) -> float:
        """Return the ms that computing all behind point `index` takes."""
        prefill, at = self._prices.prefill, self._query.points[index].position
        new = self._query.tokens - at
        return prefill.a_ms + new * (prefill.b_ms + prefill.c_ms * (at + 0.5 * new))

    def _try(self, index: int, tail_ms: float, *, load_ms: float) -> None:
        """Offer the ways through one point. `tail_ms` computes what follows it, `load_ms` loads the
        range state before it.
        """
        # Stage by stage: nothing ends before the last stage of its compute.
        ends_ms = self._load_from_ms + load_ms + tail_ms / self._stages
        if ends_ms >= self._best_ms:
            return
        point = self._query.points[index]
        if not point.lacks and (self._hit is None or self._is_one_length(point)):
            point_ms = self._point_ms(point)
            if ends_ms + point_ms < self._best_ms:
                at = point.position
                self._offer(RestoreOption(at, at, point), load_ms + point_ms, compute_ms=tail_ms)
        if self._replay_tokens is not None:
            self._try_replays(index, tail_ms, load_ms=load_ms)

    def _try_replays(self, index: int, tail_ms: float, *, load_ms: float) -> None:
        """Offer the replays that end at point `index`: from nothing, bounded, from an earlier
        point.

        `tail_ms` computes what follows the point, `load_ms` loads the range state before it.
        """
        assert self._replay_tokens is not None
        at = self._query.points[index].position
        start = max(0, at - self._replay_tokens)
        compute_ms = tail_ms + self._again_ms(start, at)
        if self._queue_ms + compute_ms < self._best_ms:
            self._offer(RestoreOption(at, start, None), load_ms, compute_ms=compute_ms)
        if self._bounded_tokens is not None and at > self._bounded_tokens:
            bounded = RestoreOption(at, at - self._bounded_tokens, None, Exactness.BOUNDED_REPLAY)
            compute_ms = tail_ms + self._again_ms(bounded.start, at)
            self._offer(bounded, load_ms, compute_ms=compute_ms)
        if self._resuming_dominates:
            return
        for earlier in self._query.points[index + 1 :]:
            compute_ms = tail_ms + self._again_ms(earlier.position, at)
            if earlier.position <= start or self._queue_ms + compute_ms >= self._best_ms:
                break
            if not earlier.lacks:
                all_ms = load_ms + self._point_ms(earlier)
                self._offer(
                    RestoreOption(at, earlier.position, earlier), all_ms, compute_ms=compute_ms
                )

    def _again_ms(self, start: int, floor: int) -> float:
        """Return what computing [start, floor) again adds to the pass that follows it."""
        replay, again = self._prices.replay, floor - start
        fixed_ms = replay.a_ms - self._prices.prefill.a_ms
        ms = again * (replay.b_ms + replay.c_ms * (start + 0.5 * again))
        return ms + fixed_ms if fixed_ms > 0.0 else ms

    def _offer(self, option: RestoreOption, load_ms: float, *, compute_ms: float) -> None:
        """Keep `option` if it is the best so far."""
        total_ms = self._total_ms(load_ms, compute_ms, option.position)
        if total_ms < self._best_ms:
            self._best_ms, self._best = total_ms, option

    def _total_ms(self, load_ms: float, compute_ms: float, position: int) -> float:
        """Return the time to the first token and lambda * M_HBM, as OptionPricer adds them up."""
        total = self._ttft_ms(load_ms, compute_ms)
        rate = self._query.hbm_ms_per_gib
        return total + rate * self._new_bytes(position) / GIB if rate else total

    def _ttft_ms(self, load_ms: float, compute_ms: float) -> float:
        begin = self._load_from_ms + load_ms / self._stages
        if begin < self._queue_ms:
            begin = self._queue_ms
        end = self._load_from_ms + load_ms + compute_ms / self._stages
        return max(begin + compute_ms, end)

    def _new_bytes(self, position: int) -> float:
        own = self._model.range_bytes_per_token * (self._query.tokens - position)
        return own + self._model.point_bytes + self._loads.moved_until(position)

    def _is_one_length(self, point: Point) -> bool:
        assert self._hit is not None
        return why_not_one_length(self._model, self._query, point, hit=self._hit) is None
