"""Prometheus metrics of a worker that owns sessions, read from its `Ownership`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.directory.owner.state import OwnerPhase
from ownerserve.node.ownership.ownership import Ownership


class OwnershipCollector(Collector):
    """Registered only by a worker that asks a directory."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    def collect(self) -> Iterator[Metric]:
        ownership = self._ownership
        yield GaugeMetricFamily(
            "ownerserve_sessions_owned",
            "Sessions that are this worker's.",
            value=len(ownership.owner.grants),
        )
        yield GaugeMetricFamily(
            "ownerserve_directory_leased",
            "1 while the directory counts this worker among the living.",
            value=ownership.phase is OwnerPhase.LIVE,
        )
        yield CounterMetricFamily(
            "ownerserve_directory_frames", "Frames sent to the directory.", value=ownership.frames
        )
        yield GaugeMetricFamily(
            "ownerserve_extents_published",
            "Copies of prefixes that the directory was told of, or is about to be.",
            value=len(ownership.publishing),
        )
        yield CounterMetricFamily(
            "ownerserve_last_copies_lost",
            "Last living copies of what a session stands on that went here.",
            value=ownership.publishing.lost_copies,
        )
        answers = CounterMetricFamily(
            "ownerserve_directory_answers",
            "What the directory answered: outcomes, and refusals by reason.",
            labels=["answer"],
        )
        for answer, count in list(ownership.answers.items()):
            answers.add_metric([answer], count)
        yield answers
        refused = CounterMetricFamily(
            "ownerserve_owner_refusals",
            "What only an owner may do and was refused, here (release) or by the directory; "
            "lease_over: what was not answered before the lease had ended; grant: one that a later "
            "owner made void.",
            labels=["verb", "reason"],
        )
        for (verb, reason), count in list(ownership.owner.refused.items()):
            refused.add_metric([verb, reason], count)
        yield refused
