"""This module makes the Prometheus metrics of a rollout: who decides, what shadows would have done,
and the arms' books."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.rollout.choice import Rollout
from ownerserve.router.rollout.steering import Mode
from ownerserve.router.settings import DERIVED, Settings

_P = "ownerserve_gateway_"


def rollout_metrics(rollout: Rollout) -> Iterator[Metric]:
    """Yield the families of one gateway's rollout."""
    choice = rollout.choice
    mode = GaugeMetricFamily(
        _P + "mode", "1 at the mode that the gateway is in: who decides.", labels=["mode"]
    )
    for one in Mode:
        mode.add_metric([one], float(one is choice.mode))
    yield mode
    yield GaugeMetricFamily(
        _P + "canary_share",
        "Share of sessions that are the canary's, of tenants without one of their own.",
        value=choice.canary_share,
    )
    yield from _shadows(rollout)
    yield from _arms(rollout)


def constant_metrics(settings: Settings) -> Iterator[Metric]:
    """Yield the family of the constants in force."""
    family = GaugeMetricFamily(
        _P + "routing_constant",
        "Constants that decisions depend on, as they are in force: their names have their units.",
        labels=["constant"],
    )
    for name in DERIVED:
        family.add_metric([name], getattr(settings, name))
    yield family


def _shadows(rollout: Rollout) -> Iterator[Metric]:
    decided = CounterMetricFamily(
        _P + "shadow_decisions",
        "Turns that a shadow decided too, and did nothing about: the same as was done, or not.",
        labels=["policy", "reason", "verdict"],
    )
    differs = CounterMetricFamily(
        _P + "shadow_difference_seconds",
        "Difference of the prices of what was done and of what the shadow would have done, by who"
        " was cheaper.",
        labels=["policy", "reason", "cheaper"],
    )
    tokens = CounterMetricFamily(
        _P + "shadow_expected_cached_tokens",
        "Prompt tokens that needed no prefill by what was decided, and by what the shadow would"
        " have.",
        labels=["policy", "by"],
    )
    for name, counts in rollout.shadows.items():
        for verdict, by_reason in (("same", counts.agreed), ("other", counts.differed)):
            for reason, count in by_reason.items():
                decided.add_metric([name, reason, verdict], count)
        for cheaper, ms in (("shadow", counts.regret_ms), ("live", counts.gain_ms)):
            for reason, sum_ms in ms.items():
                differs.add_metric([name, reason, cheaper], sum_ms / 1000.0)
        tokens.add_metric([name, "live"], counts.live_cached_tokens)
        tokens.add_metric([name, "shadow"], counts.shadow_cached_tokens)
    yield decided
    yield differs
    yield tokens


def _arms(rollout: Rollout) -> Iterator[Metric]:
    first_byte = HistogramMetricFamily(
        _P + "arm_first_byte_seconds", "Arrival to the answer's first byte, by arm.", labels=["arm"]
    )
    duration = HistogramMetricFamily(
        _P + "arm_duration_seconds", "Arrival to the answer's end, by arm.", labels=["arm"]
    )
    tokens = CounterMetricFamily(
        _P + "arm_tokens", "Tokens that workers reported in `usage`.", labels=["arm", "kind"]
    )
    ends = CounterMetricFamily(_P + "arm_ends", "How turns ended, by arm.", labels=["arm", "end"])
    displaced = CounterMetricFamily(
        _P + "arm_displaced",
        "Dispatches of an arm to the other's workers, as none of its own was left.",
        labels=["arm"],
    )
    for arm, book in rollout.books.items():
        for family, histogram in ((first_byte, book.first_byte_s), (duration, book.duration_s)):
            family.add_metric([arm], _buckets(histogram), histogram.sum)
        for kind, count in book.tokens.items():
            tokens.add_metric([arm, kind], count)
        for end, count in book.ends.items():
            ends.add_metric([arm, end], count)
        displaced.add_metric([arm], book.displaced)
    yield from (first_byte, duration, tokens, ends, displaced)


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    edges = [*(str(float(edge)) for edge in histogram.edges), "+Inf"]
    return list(zip(edges, accumulate(histogram.counts), strict=True))
