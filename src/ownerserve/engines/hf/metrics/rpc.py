"""Prometheus metrics of a worker's RPC port, read from what its server counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class RpcCollector(Collector):
    """`counts` are those of `node.rpc.server.RpcServer`."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "ownerserve_rpc_requests",
            "Requests on the RPC port that were said again, called off, or given up, and answers"
            " that came when nobody waited any more.",
            labels=["what"],
        )
        for what in ("repeated", "cancelled", "given_up", "late"):
            requests.add_metric([what], self._counts[what])
        yield requests
