"""This module tells counters to vLLM's own log line and /metrics, by its hooks for connectors."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ownerserve.engines.vllm.scheduler_side.late_turns import UNSAVED_LEVELS
from ownerserve.engines.vllm.worker_commands import STORED_BY
from ownerserve.node.transfers.counting import COUNTED, parse_name

if TYPE_CHECKING:
    from ownerserve.engines.vllm.scheduler_side.scheduler import SchedulerSide


class OwnerServeStats(KVConnectorStats):  # type: ignore[misc]
    """`OwnerServeStats` is what was counted since the last step that asked: numbers by name, which
    add up, and levels, of which the last stands."""

    @classmethod
    def taken(cls, side: SchedulerSide) -> OwnerServeStats | None:
        """Return what was counted since the last call; None where nothing was."""
        counts = side.counting.take()
        return cls(data=counts) if counts else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> OwnerServeStats:
        levels = {name: other.data[name] for name in UNSAVED_LEVELS if name in other.data}
        self.data = {**Counter(self.data) + Counter(other.data), **levels}
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class OwnerServeProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """`OwnerServeProm` exports ownerserve_vllm_*: labelled counters for outcomes, bytes and tokens,
    and a gauge of what is not stored yet; and what is counted of transfers, under the names that
    all kinds of workers have for it."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name="ownerserve_vllm_events",
            documentation="Restores, saves and bypassed requests by what came of them",
            labelnames=[*labelnames, "event"],
        )
        self._bytes = self._counter_cls(
            name="ownerserve_vllm_bytes",
            documentation="Bytes of KV loaded from the store or a peer, stored, and given up",
            labelnames=[*labelnames, "direction"],
        )
        self._by_rank = self._counter_cls(
            name="ownerserve_vllm_rank_stored_bytes",
            documentation="Bytes of KV stored by each rank of the engine core, if it has several",
            labelnames=[*labelnames, "rank"],
        )
        self._tokens = self._counter_cls(
            name="ownerserve_vllm_tokens",
            documentation="Tokens that sessions had lost, and whose KV was given up unsaved",
            labelnames=[*labelnames, "kind"],
        )
        self._unsaved = self._gauge_cls(
            name="ownerserve_vllm_unsaved_bytes",
            documentation="Bytes of KV computed and not stored yet, by where they are",
            labelnames=[*labelnames, "state"],
        )

        self._transfers = {
            metric.name: self._counter_cls(
                name=metric.name,
                documentation=metric.about,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
            )
            for metric in COUNTED
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            metric, value = parse_name(name)
            if metric in self._transfers:
                told = [*labels, value] if value else labels
                self._transfers[metric].labels(*told).inc(number)
            elif name in UNSAVED_LEVELS:
                self._unsaved.labels(*labels, name.removeprefix("unsaved_")).set(number)
            elif name.startswith(STORED_BY):
                self._by_rank.labels(*labels, name.removeprefix(STORED_BY)).inc(number)
            elif name.endswith("_tokens"):
                self._tokens.labels(*labels, name.removesuffix("_tokens")).inc(number)
            elif name.endswith("_bytes"):
                self._bytes.labels(*labels, name.removesuffix("_bytes")).inc(number)
            else:
                self._events.labels(*labels, name).inc(number)
