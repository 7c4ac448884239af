"""What a worker lent to others and brought from them, as metrics. Registered only where it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.node.transfers.counting import COUNTED, TransferCounts, counted
from ownerserve.node.transfers.landings import LandingNumbers
from ownerserve.node.transfers.opening import NodeTransfers
from ownerserve.transfer.movers.arena import ArenaNumbers


class TransferCollector(Collector):
    """A `TransferCollector` reads the counts of one node's transfers."""

    def __init__(self, transfers: NodeTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = self._transfers.counts()
        for metric in COUNTED:
            labels = [metric.label] if metric.label else []
            values = counted(counts, metric)
            yield _counter(metric.name, metric.about, labels=labels, values=values)
        yield from _ordered(counts)
        yield from _moves(counts)
        yield from _replicas(counts)
        readers = GaugeMetricFamily(
            "ownerserve_transfer_connections", "Connections on which peers read this worker now."
        )
        readers.add_metric([], counts.connections)
        yield readers
        used = GaugeMetricFamily(
            "ownerserve_stage_used_bytes",
            "Memory that holds what is lent of host memory and disk now.",
        )
        used.add_metric([], counts.stage_used_bytes)
        yield used
        yield from _landings(counts.landings)
        if counts.arena is not None:
            yield from _arena(counts.arena)


def _moves(counts: TransferCounts) -> Iterator[Metric]:
    """Yield what came of sessions and of turns that were to move."""
    moves = CounterMetricFamily(
        "ownerserve_session_moves",
        "Sessions that were to move here (came: taken) or from here (went: moved, also to the"
        " store), by how that ended, or why the session stayed.",
        labels=["way", "end"],
    )
    for (way, end), count in sorted(counts.moves.items()):
        moves.add_metric([way, end], count)
    yield moves
    handed = CounterMetricFamily(
        "ownerserve_session_handover_seconds",
        "For how long sessions that moved here were nobody's to serve, at most: from asking their"
        " owner for them until they were here.",
    )
    handed.add_metric([], counts.handover_s)
    yield handed
    turns = CounterMetricFamily(
        "ownerserve_turn_moves",
        "Turns that were to move amid their answers, to here (came: kept, and of those: went_on,"
        " called_off, unclaimed; unknown: a leg of none) or from here (went: moved), or why they"
        " stayed.",
        labels=["way", "end"],
    )
    for (way, end), count in sorted(counts.turn_moves.items()):
        turns.add_metric([way, end], count)
    yield turns
    yield _counter(
        "ownerserve_turn_states",
        "States of turns that were to move here, which their workers had sealed, by how bringing"
        " them before the turn was stopped ended: brought, outgrown (the turn grew as fast), late,"
        " or why nothing came.",
        labels=["end"],
        values=counts.turn_states,
    )
    ahead = CounterMetricFamily(
        "ownerserve_turn_state_bytes",
        "Bytes of state of turns that came here before their workers stopped them.",
    )
    ahead.add_metric([], counts.turn_state_bytes)
    yield ahead


def _replicas(counts: TransferCounts) -> Iterator[Metric]:
    """Yield what came of read-only replicas that were to be made here."""
    yield _counter(
        "ownerserve_replicas",
        "Read-only replicas of prefixes that were to be made here, by how that ended: taken, or why"
        " there is none.",
        labels=["end"],
        values=counts.replicas,
    )
    moved = CounterMetricFamily(
        "ownerserve_replica_bytes", "Bytes of state that came from peers as read-only replicas."
    )
    moved.add_metric([], counts.replica_bytes)
    yield moved


def _landings(numbers: LandingNumbers) -> Iterator[Metric]:
    """Yield what there is of landings."""
    used = GaugeMetricFamily(
        "ownerserve_landing_bytes",
        "Host memory of --landing-memory into which peers' state comes: coming, landed (whole, and"
        " not copied to the device yet), or held (its bring is over, and somebody may still write"
        " there).",
        labels=["state"],
    )
    used.add_metric(["coming"], numbers.coming_bytes)
    used.add_metric(["landed"], numbers.landed_bytes)
    used.add_metric(["held"], numbers.held_bytes)
    yield used
    oldest = GaugeMetricFamily(
        "ownerserve_landing_oldest_seconds",
        "How long the oldest of it has been coming, or held; 0: none is. What stays held is what a"
        " reader is stuck in.",
        labels=["state"],
    )
    oldest.add_metric(["coming"], numbers.oldest_coming_s)
    oldest.add_metric(["held"], numbers.oldest_held_s)
    yield oldest


def _arena(numbers: ArenaNumbers) -> Iterator[Metric]:
    """Yield what there is of the arena; only where a road needs one."""
    held = GaugeMetricFamily(
        "ownerserve_transfer_arena_bytes",
        "Bytes of the arena of --transfer-arena: free, reserved (a read's goal now), abandoned (its"
        " writer may write on: used for nothing until it is known to have stopped).",
        labels=["state"],
    )
    for state in ("free", "reserved", "abandoned"):
        held.add_metric([state], getattr(numbers, f"{state}_bytes"))
    yield held
    abandoned = CounterMetricFamily(
        "ownerserve_transfer_arena_abandoned",
        "Reads whose part of the arena was abandoned, ever.",
    )
    abandoned.add_metric([], numbers.abandoned_total)
    yield abandoned
    refused = CounterMetricFamily(
        "ownerserve_transfer_arena_refused",
        "Reads for which the arena had no room: they went by the next road.",
    )
    refused.add_metric([], numbers.refused_total)
    yield refused
    oldest = GaugeMetricFamily(
        "ownerserve_transfer_arena_oldest_abandoned_seconds",
        "How long the oldest part that is abandoned has been; 0: none is.",
    )
    oldest.add_metric([], numbers.oldest_abandoned_s)
    yield oldest


def _ordered(counts: TransferCounts) -> Iterator[Metric]:
    """Yield what was computed by others, and for others."""
    yield _counter(
        "ownerserve_prefill_orders",
        "Prompts that peers were asked to compute for this worker: accepted, refused, late (the"
        " peer would be ready too late).",
        labels=["answer"],
        values=counts.orders,
    )
    yield _counter(
        "ownerserve_ordered_bytes",
        "Bytes of prompts that peers computed for this worker: early, while the peer computed on,"
        " or behind, once it was done.",
        labels=["when"],
        values=counts.ordered_bytes,
    )
    yield _counter(
        "ownerserve_prefills_for_peers",
        "Prompts that this worker was asked to compute for others: accepted, and of those: joined"
        " (by who reads and a gateway's leg), read (whole), left (before it was whole), called_off,"
        " unasked; or why it refused.",
        labels=["end"],
        values=counts.prefills,
    )
    yield _counter(
        "ownerserve_prefill_told_bytes",
        "Bytes of prompts that this worker computes for others, by when who reads them is told:"
        " after a layer, while the step goes on, or after a step.",
        labels=["after"],
        values=counts.told_bytes,
    )


def _counter(name: str, about: str, *, labels: list[str], values: Mapping[str, int]) -> Metric:
    """Return a counter by the values of its one label, or without a label."""
    family = CounterMetricFamily(name, about, labels=labels)
    for value, count in sorted(values.items()):
        family.add_metric([value] if labels else [], count)
    return family
