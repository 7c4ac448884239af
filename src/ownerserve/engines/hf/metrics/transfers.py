"""What a worker lent to others and brought from them, as metrics. Registered only where it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.node.transfers.opening import NodeTransfers, TransferCounts
from ownerserve.transfer.movers.arena import ArenaNumbers


class TransferCollector(Collector):
    """A `TransferCollector` reads the counts of one node's transfers."""

    def __init__(self, transfers: NodeTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = self._transfers.counts()
        yield _counter(
            "ownerserve_peer_looks",
            "Peers asked what they hold of a turn's session: found, nothing, parted (other tokens"
            " than the prompt's), silent (no answer in time).",
            labels=["answer"],
            values=counts.looks,
        )
        yield _counter(
            "ownerserve_brought",
            "Brings of state from a peer, by how they ended: brought, or why nothing came"
            " (transfer.control.events.BringEnd).",
            labels=["end"],
            values=counts.brings,
        )
        yield _counter(
            "ownerserve_brought_bytes",
            "Bytes of state that came from peers and counted, by road: shm, readv, tcp, mooncake,"
            " nixl.",
            labels=["road"],
            values=counts.brought_bytes,
        )
        yield _counter(
            "ownerserve_lends",
            "Lends to peers, by how they ended: returned, expired (nobody read), revoked (a turn"
            " needed the room), cancelled, or why nothing was lent.",
            labels=["end"],
            values=counts.lends,
        )
        yield from _staged(counts)
        yield from _ordered(counts)
        moves = CounterMetricFamily(
            "ownerserve_session_moves",
            "Sessions that were to move here (came: taken) or from here (went: moved, also to the"
            " store), by how that ended, or why the session stayed.",
            labels=["way", "end"],
        )
        for (way, end), count in sorted(counts.moves.items()):
            moves.add_metric([way, end], count)
        yield moves
        yield from _replicas(counts)
        read = CounterMetricFamily(
            "ownerserve_peer_read_bytes",
            "Bytes that were read of peers, also those that did not count in the end.",
        )
        read.add_metric([], counts.read_bytes)
        yield read
        readers = GaugeMetricFamily(
            "ownerserve_transfer_connections", "Connections on which peers read this worker now."
        )
        readers.add_metric([], counts.connections)
        yield readers
        if counts.arena is not None:
            yield from _arena(counts.arena)


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


def _staged(counts: TransferCounts) -> Iterator[Metric]:
    """Yield what was read of this worker's own tiers for peers."""
    read = CounterMetricFamily(
        "ownerserve_staged_bytes", "Bytes read of host memory and disk to be lent to peers."
    )
    read.add_metric([], counts.staged_bytes)
    yield read
    failed = CounterMetricFamily(
        "ownerserve_staging_failures",
        "Reads of host memory and disk for peers that gave nothing: the lend ended short.",
    )
    failed.add_metric([], counts.failed_stagings)
    yield failed
    used = GaugeMetricFamily(
        "ownerserve_stage_used_bytes", "Memory that holds what is lent of host memory and disk now."
    )
    used.add_metric([], counts.stage_used_bytes)
    yield used


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
        "Prompts that this worker was asked to compute for others: accepted, and of those: read"
        " (whole), left (before it was whole), called_off, unasked; or why it refused.",
        labels=["end"],
        values=counts.prefills,
    )


def _counter(name: str, about: str, *, labels: list[str], values: Mapping[str, int]) -> Metric:
    """Return a counter with one label, by whose values it counts."""
    family = CounterMetricFamily(name, about, labels=labels)
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
