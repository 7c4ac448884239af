"""This module makes the figures of who waits before the fleet and who is not let in: Prometheus
families for the admin port, JSON values for its pages. They are made when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from ownerserve.gateway.admin_api.answers import NotLetIns, Queue, WaitingTurns

if TYPE_CHECKING:
    from ownerserve.gateway.turns import Turns

_P = "ownerserve_gateway_"


def entry_families(turns: Turns) -> Iterator[Metric]:
    """Yield the families of the entry of turns. `tenant` is a name of the tenants file; "": none is
    named there."""
    depth = GaugeMetricFamily(
        _P + "queue_turns", "Turns that wait before the fleet.", labels=["tenant", "class"]
    )
    for labels, count in _depths(turns).items():
        depth.add_metric(labels, count)
    yield depth
    waits = HistogramMetricFamily(
        _P + "queue_wait_seconds",
        "Arrival to being let in, of turns that a queue stood before.",
        labels=["tenant", "class"],
    )
    for (tenant, session_class), histogram in turns.observer.waits_s.items():
        edges = [*(str(float(edge)) for edge in histogram.edges), "+Inf"]
        waits.add_metric(
            [tenant, session_class],
            buckets=list(zip(edges, accumulate(histogram.counts), strict=True)),
            sum_value=histogram.sum,
        )
    yield waits
    away = CounterMetricFamily(
        _P + "not_let_in",
        "Requests that were not let in: turned away by the queue, or over a rate limit.",
        labels=["tenant", "class", "reason"],
    )
    for labels3, count in turns.observer.not_let_in.items():
        away.add_metric(labels3, count)
    yield away


def entry_figures(turns: Turns) -> Queue:
    """Return who waits and who was not let in."""
    return Queue(
        waiting=[
            WaitingTurns(tenant=tenant, session_class=session_class, turns=count)
            for (tenant, session_class), count in sorted(_depths(turns).items())
        ],
        not_let_in=[
            NotLetIns(tenant=tenant, session_class=session_class, reason=reason, count=count)
            for (tenant, session_class, reason), count in sorted(turns.observer.not_let_in.items())
        ],
    )


def _depths(turns: Turns) -> Counter[tuple[str, str]]:
    """Return how many turns wait, by tenant and class."""
    waiting = turns.admission.waiting()
    return Counter((one.terms.name, one.session_class.value) for one in waiting)
