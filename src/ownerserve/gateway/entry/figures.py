"""This module makes the figures of who waits before the fleet and who is not let in: Prometheus
families for the admin port, JSON values for its pages. They are made when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from ownerserve.gateway.admin_api.answers import HeldTurnRow, NotLetIns, Queue, WaitingTurns
from ownerserve.gateway.histograms import Histogram
from ownerserve.router.entry.queue import HeldTurn
from ownerserve.router.entry.terms import WaitReason

if TYPE_CHECKING:
    from ownerserve.gateway.turns import Turns

_P = "ownerserve_gateway_"
TOLD_MAX = 50
"""So many of those who wait are told one by one."""


def entry_families(turns: Turns) -> Iterator[Metric]:
    """Yield the families of the entry of turns. `tenant` is a name of the tenants file; "": none is
    named there."""
    waiting = turns.admission.waiting()
    depth = GaugeMetricFamily(
        _P + "queue_turns", "Turns that wait before the fleet.", labels=["tenant", "class"]
    )
    who = Counter((one.turn.terms.name, one.turn.session_class.value) for one in waiting)
    for labels, count in who.items():
        depth.add_metric(labels, count)
    yield depth
    yield from _reasons(turns, Counter(one.reason for one in waiting))
    waits = HistogramMetricFamily(
        _P + "queue_wait_seconds",
        "Arrival to being let in, of turns that a queue stood before.",
        labels=["tenant", "class"],
    )
    for (tenant, session_class), histogram in turns.observer.waits_s.items():
        waits.add_metric(
            [tenant, session_class], buckets=_buckets(histogram), sum_value=histogram.sum
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


def _reasons(turns: Turns, waiting: Counter[WaitReason]) -> Iterator[Metric]:
    """Yield the families of what turns wait for."""
    now = GaugeMetricFamily(
        _P + "turns_waiting", "Turns that wait before the fleet, by what for.", labels=["reason"]
    )
    waits = HistogramMetricFamily(
        _P + "turn_wait_seconds",
        "How long turns waited before the fleet that went on, by what for.",
        labels=["reason"],
    )
    places = HistogramMetricFamily(
        _P + "turn_wait_place_turns",
        "Where turns stood in line when they came (the first: 1) that waited before the fleet and"
        " went on, by what for.",
        labels=["reason"],
    )
    observer = turns.observer
    for reason, histogram in observer.waits_for_s.items():
        label, place = [reason.value], observer.places[reason]
        now.add_metric(label, waiting[reason])
        waits.add_metric(label, buckets=_buckets(histogram), sum_value=histogram.sum)
        places.add_metric(label, buckets=_buckets(place), sum_value=place.sum)
    yield now
    yield waits
    yield places
    yield CounterMetricFamily(
        _P + "let_in_without_room",
        "New sessions that were let in without a seat, as their patience was over.",
        value=_without_room(turns),
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    edges = [*(str(float(edge)) for edge in histogram.edges), "+Inf"]
    return list(zip(edges, accumulate(histogram.counts), strict=True))


def _without_room(turns: Turns) -> int:
    seats = turns.admission.seats
    return 0 if seats is None else seats.impatient


def entry_figures(turns: Turns) -> Queue:
    """Return who waits and who was not let in."""
    waiting = turns.admission.waiting()
    kinds = Counter(
        (one.turn.terms.name, one.turn.session_class.value, one.reason) for one in waiting
    )
    return Queue(
        waiting=[
            WaitingTurns(tenant=tenant, session_class=session_class, reason=reason, turns=count)
            for (tenant, session_class, reason), count in sorted(kinds.items())
        ],
        first=_first(turns, waiting[:TOLD_MAX]),
        without_room=_without_room(turns),
        not_let_in=[
            NotLetIns(tenant=tenant, session_class=session_class, reason=reason, count=count)
            for (tenant, session_class, reason), count in sorted(turns.observer.not_let_in.items())
        ],
    )


def _first(turns: Turns, waiting: Sequence[HeldTurn]) -> list[HeldTurnRow]:
    """Return turns that wait, one by one."""
    places, now_s = turns.admission.places() if waiting else {}, turns.now()
    return [
        HeldTurnRow(
            session=one.turn.session,
            tenant=one.turn.terms.name,
            session_class=one.turn.session_class.value,
            reason=one.reason,
            waited_s=round(now_s - one.turn.came_s, 3),
            place=places[one.one.ticket].place,
            of=places[one.one.ticket].of,
            came_at=one.came.place,
        )
        for one in waiting
    ]
