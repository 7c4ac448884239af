"""The metrics of several relays as those of one gateway: counters and histograms are summed, gauges
by what they mean.

Owns what relays that were killed had counted, as last read: a sum that fell would look to
Prometheus as if everything had been counted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_P = "ownerserve_gateway_"
LARGEST = frozenset(
    {
        _P + "canary_share",
        _P + "certificate_end_timestamp_seconds",
        _P + "discovered_workers",
        _P + "longest_lost_run_turns",
        _P + "mode",
        _P + "process_life",
        _P + "routing_constant",
        _P + "seat_stay_seconds",
        _P + "turn_move_longest_pause_seconds",
        _P + "worker_busy_share",
        _P + "worker_extents",
        _P + "worker_queue_seconds",
        _P + "worker_refill_share",
        _P + "worker_up",
    }
)
"""Gauges of which every relay tells the same thing: all others are of what it has of its own."""
_FALLING = ("gauge", "untyped", "unknown")

Sample: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


class ToldFamily(NamedTuple):
    """A family of one relay, or of all: `values` by sample."""

    kind: str
    text: str
    values: dict[Sample, float]


ToldFamilies: TypeAlias = dict[str, ToldFamily]


def read(exposition: str) -> ToldFamilies:
    """Read what a relay exposes."""
    return {
        metric.name: ToldFamily(
            metric.type,
            metric.documentation,
            {(one.name, tuple(one.labels.items())): one.value for one in metric.samples},
        )
        for metric in text_string_to_metric_families(exposition)
    }


class Counted:
    """What relays have counted, by process, over their lives."""

    def __init__(self) -> None:
        self._lives: dict[int, tuple[int, ToldFamilies]] = {}
        self._gone: list[ToldFamilies] = []

    def exposition(self, told: Mapping[int, tuple[int, ToldFamilies]]) -> bytes:
        """Return all as one exposition; `told`: the life and families of the relays that answer
        now."""
        for process, (life, families) in told.items():
            before = self._lives.get(process)
            if before is not None and before[0] != life:
                self._gone = [_added([*self._gone, _rising(before[1])])]
            self._lives[process] = life, families
        away = [_rising(one) for process, (_, one) in self._lives.items() if process not in told]
        now = [families for _, families in told.values()]
        registry = CollectorRegistry()
        registry.register(_Merged(_added([*now, *away, *self._gone])))
        return generate_latest(registry)


def _rising(families: ToldFamilies) -> ToldFamilies:
    """Return what is left of a process that is gone: what it counted."""
    return {name: one for name, one in families.items() if one.kind not in _FALLING}


def _added(several: list[ToldFamilies]) -> ToldFamilies:
    """Return families together."""
    together: ToldFamilies = {}
    for families in several:
        for name, family in families.items():
            if name not in together:
                together[name] = family._replace(values=dict(family.values))
                continue
            values = together[name].values
            for sample, value in family.values.items():
                had = values.get(sample, 0.0)
                values[sample] = max(had, value) if name in LARGEST else had + value
    return together


class _Merged(Collector):
    """The collector tells families that are there already."""

    def __init__(self, families: ToldFamilies) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            metric = Metric(name, family.text, family.kind)
            for (sample, labels), value in family.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
