"""This module decides what to do with a session's state while its tool runs: keep, spill, and when
to fetch it back.

    turn end ──── held ────┬─ gone ─────────┬─ fetched, held again ─── next turn
                           T_spill          T_prefetch

The gap G is taken as log-normal, from the session's own gaps as far as there are any (trace
statistics: medians of seconds, 19 % over a minute, 7 % over five). Everything that is needed has a
closed form in m(t) = E[min(G, t)]:

    held before the spill     h * m(T_spill)
    spill, and the way back   (w + L) * P(G > T_spill)
    fetched ahead (saved)     - (m(T_prefetch + L) - m(T_prefetch))
    held after that           h * (m(T_prefetch + ttl) - m(T_prefetch))

with h the price of the memory (ms per s), w that of the spill, L the time to load. The two instants
only meet in T_spill <= T_prefetch, so each is sought on a grid over the gap's distribution: a
coarse one, since this runs at every turn's end and cost is flat around the best instants. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from math import erf, exp, inf, log, sqrt
from statistics import NormalDist

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.plan.inputs import Abilities

MEMORY_GAPS = 16
"""A session's gaps older than about this many no longer count."""
PRIOR_GAPS = 3.0
"""What the population counts for, in observed gaps."""
MIN_GAP_S = 1e-3
PLANS_KEPT = 16_384
"""Plans by what they follow from, which callers round: all workers of a process ask alike."""
_NORMAL = NormalDist()
_DEVIATIONS = tuple(-2.6 + 0.25 * i for i in range(21))
"""Where to look, in deviations of ln G. Coarse, and far down: just before a tool that is always as
slow returns, a fetch saves most. Three times as many find no plan that is 2 % cheaper (tests)."""
MIN_SIGMA = 0.05
"""Below this the grid would be a point: no tool is that regular."""


class Gap(msgspec.Struct, frozen=True):
    """A gap is a distribution: ln G is normal with mean `mu` and deviation `sigma` (G in s)."""

    mu: float
    sigma: float

    def cdf(self, t_s: float) -> float:
        """Return P(G <= t)."""
        return _phi((log(t_s) - self.mu) / self.sigma) if t_s > 0.0 else 0.0

    def mean_until(self, t_s: float) -> float:
        """Return m(t) = E[min(G, t)], in s: how much of the gap lies before t, on average."""
        if t_s <= 0.0:
            return 0.0
        if t_s == inf:
            return exp(self.mu + self.sigma**2 / 2.0)
        z = (log(t_s) - self.mu) / self.sigma
        below = exp(self.mu + self.sigma**2 / 2.0) * _phi(z - self.sigma)
        return below + t_s * (1.0 - _phi(z))

    def seen_from(self, times_s: list[float]) -> tuple[list[float], list[float]]:
        """Return P(G > t) and `mean_until` of each t."""
        scale, shift = sqrt(0.5) / self.sigma, self.sigma * sqrt(0.5)
        half, least = 0.5 * exp(self.mu + self.sigma**2 / 2.0), 1e-3 * MIN_GAP_S
        mu = self.mu
        # 0 has no logarithm.
        xs = [(log(t if t > least else least) - mu) * scale for t in times_s]
        beyond = [0.5 - 0.5 * erf(x) for x in xs]
        until = [
            half + half * erf(x - shift) + t * share
            for t, x, share in zip(times_s, xs, beyond, strict=True)
        ]
        return beyond, until

    def means_until(self, times_s: list[float]) -> list[float]:
        """Return `mean_until` of each t, as `seen_from` does."""
        scale, shift = sqrt(0.5) / self.sigma, self.sigma * sqrt(0.5)
        half, least = 0.5 * exp(self.mu + self.sigma**2 / 2.0), 1e-3 * MIN_GAP_S
        mu = self.mu
        return [
            half
            + half * erf((x := (log(t if t > least else least) - mu) * scale) - shift)
            + t * (0.5 - 0.5 * erf(x))
            for t in times_s
        ]

    def rounded(self) -> Gap:
        """Return the gap rounded to a tenth of a logarithm: costs are flat around the best
        instants, and gaps that are nearly alike have one plan.
        """
        return Gap(round(self.mu, 1), max(round(self.sigma, 1), MIN_SIGMA))

    def quantile(self, share: float) -> float:
        """Return the gap, in s, that `share` of all gaps stay below."""
        return exp(self.mu + self.sigma * _NORMAL.inv_cdf(share))


POPULATION = Gap(mu=log(5.6), sigma=2.7)
"""The log-normal through what design.md gives of Claude-Code sessions: 19 % of the gaps are over
60 s, 7 % over 300 s. A fleet replaces it by its own."""


class GapStats(msgspec.Struct):
    """Gap stats are one session's gaps so far: exponentially forgotten mean and variance of ln
    G.
    """

    count: int = 0
    mean_log: float = 0.0
    var_log: float = 0.0

    def observe(self, gap_s: float) -> None:
        """Count one gap, in s, from the end of a turn to the arrival of the next. Raises
        InvalidInput for a negative one.
        """
        if gap_s < 0.0:
            raise InvalidInput("gap_s", f"{gap_s}", "a gap can't be negative")
        self.count += 1
        weight = max(1.0 / self.count, 1.0 / MEMORY_GAPS)
        off = log(max(gap_s, MIN_GAP_S)) - self.mean_log
        self.mean_log += weight * off
        self.var_log = (1.0 - weight) * (self.var_log + weight * off * off)

    def gap(self, population: Gap = POPULATION) -> Gap:
        """Return the next gap as expected: the session's own gaps, shrunk to the population's.

        The mix of two groups: its variance counts how far their means lie apart.
        """
        own = min(self.count, MEMORY_GAPS)
        share = own / (own + PRIOR_GAPS)
        mu = share * self.mean_log + (1.0 - share) * population.mu
        apart = share * (1.0 - share) * (self.mean_log - population.mu) ** 2
        variance = share * self.var_log + (1.0 - share) * population.sigma**2
        return Gap(mu, max(sqrt(variance + (apart if self.count else 0.0)), MIN_SIGMA))


class GapCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Gap costs are what the state costs while nobody uses it.

    `hold_ms_per_s`: benefit that its memory would bring others, per second (lambda times its GiB
    over the time that lambda is an average of). `spill_ms`: price of writing it, 0 when a copy
    already lies below. `load_ms`: time to bring it back. `ttl_s`: it goes by itself after that.
    """

    hold_ms_per_s: float
    spill_ms: float
    load_ms: float
    ttl_s: float = 300.0


class GapPlan(msgspec.Struct, frozen=True):
    """A gap plan says how many seconds after the turn's end to spill and to fetch back; None: not
    at all.

    `cost_ms` is what that costs on average, `hold_cost_ms` what just keeping it would have.
    """

    spill_after_s: float | None
    prefetch_after_s: float | None
    cost_ms: float
    hold_cost_ms: float

    @property
    def actions(self) -> tuple[tuple[float, RestoreAction], ...]:
        """Return (seconds after the turn's end, action): DROP gives up the device copy, once it is
        safe below; PREFETCH brings it back.
        """
        timed = (
            (self.spill_after_s, RestoreAction.DROP),
            (self.prefetch_after_s, RestoreAction.PREFETCH),
        )
        return tuple((at_s, action) for at_s, action in timed if at_s is not None)


def can_prefetch(abilities: Abilities) -> bool:
    """Tell whether state can be brought near before its request is there: into the device when the
    engine takes state without an owner, into host memory when foreign state lands there anyway.
    """
    return abilities.can_insert or abilities.landing_tier is Tier.HOST


@lru_cache(PLANS_KEPT)
def plan_gap(gap: Gap, costs: GapCosts, abilities: Abilities) -> GapPlan:
    """Decide when to spill and when to fetch back, by expected cost."""
    hold_cost = costs.hold_ms_per_s * gap.mean_until(costs.ttl_s)
    instants = _grid(gap, costs)
    beyond, until = gap.seen_from(instants)
    fetches = [0.0] * len(instants)
    if can_prefetch(abilities):
        fetches = [0.0, *_fetches_ms(gap, costs, instants[1:], until=until[1:])]
    hold, back = costs.hold_ms_per_s, costs.spill_ms + costs.load_ms
    best_ms, best = hold_cost, (inf, inf)
    # Sweeping T_spill downwards, the best T_prefetch after it only has to be compared with one new.
    fetch_ms, fetch_s = 0.0, inf
    for at_s, share, held_s, ms in reversed(
        list(zip(instants, beyond, until, fetches, strict=True))
    ):
        if ms < fetch_ms:
            fetch_ms, fetch_s = ms, at_s
        total_ms = hold * held_s + back * share + fetch_ms
        if total_ms < best_ms:
            best_ms, best = total_ms, (at_s, fetch_s)
    spill_after_s, fetch_after_s = (None if at_s == inf else at_s for at_s in best)
    return GapPlan(spill_after_s, fetch_after_s, best_ms, hold_cost)


@lru_cache(PLANS_KEPT)
def prefetch_after_s(gap: Gap, costs: GapCosts, shares: tuple[float, ...]) -> float | None:
    """Decide when to fetch back what is gone already: done just as one of `shares` of the gaps end.
    None when loading on demand is as good.
    """
    load_s = costs.load_ms / 1e3
    instants = [max(0.0, gap.quantile(share) - load_s) for share in shares]
    until = gap.means_until(instants)
    saved = _fetches_ms(gap, costs, instants, until=until)
    best_ms, best_s = min(zip(saved, instants, strict=True))
    return best_s if best_ms < 0.0 else None


def _fetches_ms(
    gap: Gap, costs: GapCosts, instants: list[float], *, until: list[float]
) -> list[float]:
    """Return what fetching at each of `instants`, whose means are `until`, adds: memory held again,
    less the load that is no longer waited for.
    """
    hold, load_s, ttl_s = costs.hold_ms_per_s, costs.load_ms / 1e3, costs.ttl_s
    landed = gap.means_until([t + load_s for t in instants])
    gone = gap.means_until([t + ttl_s for t in instants])
    return [
        hold * (after - now) - 1e3 * (there - now)
        for now, there, after in zip(until, landed, gone, strict=True)
    ]


def _grid(gap: Gap, costs: GapCosts) -> list[float]:
    """Return the instants to try, ascending: at once, gaps of all lengths within the TTL, and one
    load before each of them (done just in time).
    """
    mu, sigma, load_s, ttl_s = gap.mu, gap.sigma, costs.load_ms / 1e3, costs.ttl_s
    gaps = [exp(mu + sigma * z) for z in _DEVIATIONS]
    instants = gaps + [t - load_s for t in gaps]
    return [0.0, *sorted([t for t in instants if 0.0 < t < ttl_s])]


def _phi(z: float) -> float:
    """Return the normal distribution function at z."""
    return 0.5 * (1.0 + erf(z / sqrt(2.0)))
