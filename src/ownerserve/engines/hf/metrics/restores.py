"""Prometheus metrics of restores and spills. Counts what it is told; decides nothing."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from ownerserve.engines.hf.metrics.store import StoreMetrics
from ownerserve.kv.messages import RestoreAction
from ownerserve.node.vocabulary.events import RestoreReport

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RestoreMetrics:
    """Registered only by a worker that has a node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen: Counts[str] = Counts()
        self._seen_bytes = 0
        self.store = StoreMetrics(registry)
        self._outcomes = Counter(
            "ownerserve_restores",
            "Turns by what came of their wish for stored state.",
            ["outcome"],
            registry=registry,
        )
        self._misses = Counter(
            "ownerserve_restore_misses",
            "Reads of a restore that gave nothing: each was planned around.",
            registry=registry,
        )
        self._actions = Counter(
            "ownerserve_restore_actions",
            "Turns by the actions that brought their state.",
            ["action"],
            registry=registry,
        )
        self._bytes = Counter(
            "ownerserve_restored_bytes", "Bytes loaded from the store.", registry=registry
        )
        self._saved_ms = Counter(
            "ownerserve_restore_benefit_ms",
            "What loads saved against a full prefill, by the plan's prices.",
            registry=registry,
        )
        self._parts = Histogram(
            "ownerserve_restore_seconds",
            "Arrival to first token by part: load, queue, recompute.",
            ["part"],
            buckets=SECONDS,
            registry=registry,
        )
        self._spills = Counter(
            "ownerserve_spill_records",
            "Records of idle sessions by outcome: kept, not_kept, evicted_first, point_gone,"
            " low_utility (sessions).",
            ["outcome"],
            registry=registry,
        )
        self._spilled_bytes = Counter(
            "ownerserve_spilled_bytes",
            "Bytes written to the store, headers and padding included.",
            registry=registry,
        )

    def decided(self, report: RestoreReport) -> None:
        """A turn's restore is over, one way or another."""
        self._outcomes.labels(report.outcome.value).inc()
        self._misses.inc(report.misses)
        self._bytes.inc(report.loaded_bytes)
        if report.loaded_bytes and report.plan is not None:
            self._saved_ms.inc(max(0.0, report.plan.reuse_benefit_ms))

    def acted(self, actions: Iterable[RestoreAction]) -> None:
        """A turn began with these."""
        for action in dict.fromkeys(actions):
            self._actions.labels(action.value).inc()

    def recomputed(self, *, load_s: float, queue_s: float, recompute_s: float) -> None:
        """A turn has its first token."""
        self._parts.labels("load").observe(load_s)
        self._parts.labels("queue").observe(queue_s)
        self._parts.labels("recompute").observe(recompute_s)

    def stored(self, counts: Counts[str], stored_bytes: int) -> None:
        """The node's own running counts."""
        if counts == self._seen and stored_bytes == self._seen_bytes:
            return
        for outcome, total in counts.items():
            self._spills.labels(outcome).inc(total - self._seen[outcome])
        self._spilled_bytes.inc(stored_bytes - self._seen_bytes)
        self._seen, self._seen_bytes = counts.copy(), stored_bytes
