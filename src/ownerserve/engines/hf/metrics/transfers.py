"""What a worker lent to others and brought from them, as metrics. Registered only where it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.node.transfers.opening import NodeTransfers, TransferCounts


class TransferCollector(Collector):
    """A `TransferCollector` reads the counts of one node's transfers."""

    def __init__(self, transfers: NodeTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = self._transfers.counts()
        for name, help_, label, values in (
            (
                "peer_looks",
                "Peers asked what they hold of a turn's session: found, nothing, parted (other"
                " tokens than the prompt's), silent (no answer in time).",
                "answer",
                counts.looks,
            ),
            (
                "brought",
                "Brings of state from a peer, by how they ended: brought, or why nothing came"
                " (transfer.control.events.BringEnd).",
                "end",
                counts.brings,
            ),
            (
                "brought_bytes",
                "Bytes of state that came from peers and counted, by road: shm, readv, tcp.",
                "road",
                counts.brought_bytes,
            ),
            (
                "lends",
                "Lends to peers, by how they ended: returned, expired (nobody read), revoked (a"
                " turn needed the room), cancelled, or why nothing was lent.",
                "end",
                counts.lends,
            ),
        ):
            yield _counted(name, help_, label, values=values)
        yield from _ordered(counts)
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


def _ordered(counts: TransferCounts) -> Iterator[Metric]:
    """Yield what was computed by others, and for others."""
    for name, help_, label, values in (
        (
            "prefill_orders",
            "Prompts that peers were asked to compute for this worker: accepted, refused, late"
            " (the peer would be ready too late).",
            "answer",
            counts.orders,
        ),
        (
            "ordered_bytes",
            "Bytes of prompts that peers computed for this worker: early, while the peer computed"
            " on, or behind, once it was done.",
            "when",
            counts.ordered_bytes,
        ),
        (
            "prefills_for_peers",
            "Prompts that this worker was asked to compute for others: accepted, and of those: read"
            " (whole), left (before it was whole), called_off, unasked; or why it refused.",
            "end",
            counts.prefills,
        ),
    ):
        yield _counted(name, help_, label, values=values)


def _counted(name: str, help_: str, label: str, *, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"ownerserve_{name}", help_, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
