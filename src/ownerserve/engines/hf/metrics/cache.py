"""The cache's own numbers as Prometheus metrics, read from one dated snapshot a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.cache.metrics import Counters, Snapshot


def render(snapshot: Snapshot) -> bytes:
    """Text exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CacheCollector(snapshot))
    return generate_latest(registry)


class _CacheCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now, counters = self._snapshot, self._snapshot.counters
        yield from _sums(
            {
                "evicted_tokens": (
                    "Tokens whose range state was evicted.",
                    counters.evicted_tokens,
                ),
                "evicted_bytes": ("Bytes of range state evicted.", counters.evicted_bytes),
                "eviction_wanted_tokens": (
                    "Tokens that evictions were asked for; evicted less wanted is waste.",
                    counters.wanted_tokens,
                ),
                "reprefilled_tokens": (
                    "Tokens computed again for a known session.",
                    counters.reprefilled_tokens,
                ),
            }
        )
        yield from _relief(counters)
        yield _labelled(
            CounterMetricFamily(
                "ownerserve_restorable_points_lost", "By reason.", labels=["reason"]
            ),
            counters.points_lost,
        )
        yield GaugeMetricFamily(
            "ownerserve_restorable_points", "Boundaries that lack nothing.", now.restorable_points
        )
        yield from _by_component(now)


def _by_component(now: Snapshot) -> Iterator[Metric]:
    """Levels of components and tails."""
    for name, about, values in (
        ("resident_tokens", "Tokens whose state is resident.", now.cached_tokens),
        ("tail_tokens", "Running tokens that wait for their window.", now.tail_tokens),
        (
            "fragmentation_internal_bytes",
            "Padding, unfilled blocks and empty tail rows in used slots.",
            now.fragmentation.internal_bytes,
        ),
        (
            "fragmentation_external_bytes",
            "Free point slots that no snapshot can use.",
            now.fragmentation.external_bytes,
        ),
    ):
        family = GaugeMetricFamily(f"ownerserve_cache_{name}", about, labels=["component"])
        yield _labelled(family, values)


def _relief(counters: Counters) -> Iterator[Metric]:
    """What watermarks brought about."""
    yield from _sums(
        {
            "relief_runs": ("Times a low watermark was acted on.", counters.relief_runs),
            "spilled_points": (
                "Boundaries whose point state was copied below because room was short.",
                counters.spilled_points,
            ),
            "failed_spills": ("Spills that came to nothing.", counters.failed_spills),
        }
    )
    yield _labelled(
        CounterMetricFamily(
            "ownerserve_cache_evicted_points", "Slots evicted.", labels=["component"]
        ),
        counters.evicted_points,
    )


def _sums(values: dict[str, tuple[str, int]]) -> Iterator[Metric]:
    for name, (about, value) in values.items():
        yield CounterMetricFamily(f"ownerserve_cache_{name}", about, value)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, int]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
