"""Prometheus metrics of what storing wears: checkpoints, the drive, upkeep. Decides nothing."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from ownerserve.plan.swa.accounting import WriteAccount


class StoreMetrics:
    """Registered only by a worker that has a node. Told running totals; counts what is new."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._account = WriteAccount()
        self._upkeep_seen: Counts[str] = Counts()
        self._bytes = Counter(
            "ownerserve_checkpoint_bytes",
            "Written by kind: range, point (payload), drive (both, with headers and padding); read"
            " back: point_read.",
            ["kind"],
            registry=registry,
        )
        self._amplification = Gauge(
            "ownerserve_write_amplification",
            "Bytes that reached the drive for each byte of range state written.",
            registry=registry,
        )
        self._slots_seen: Counts[str] = Counts()
        self._slots = Counter(
            "ownerserve_spilled_slots",
            "Blocks of range components, and boundaries of point components, that were stored.",
            ["component"],
            registry=registry,
        )
        self._upkeep = Counter(
            "ownerserve_store_upkeep",
            "What the store's upkeep did: passes, expired, segments_compacted, segments_dropped,"
            " compacted_bytes, quarantine_released, failed.",
            ["step"],
            registry=registry,
        )

    def wrote(self, account: WriteAccount) -> None:
        """What was written and read back so far."""
        if account == self._account:
            return
        for kind, total, before in (
            ("range", account.range_payload_bytes, self._account.range_payload_bytes),
            ("point", account.point_payload_bytes, self._account.point_payload_bytes),
            ("drive", account.drive_bytes, self._account.drive_bytes),
            ("point_read", account.point_read_bytes, self._account.point_read_bytes),
        ):
            self._bytes.labels(kind).inc(total - before)
        self._amplification.set(account.write_amplification)
        self._account = msgspec.structs.replace(account)

    def spilled(self, slots: Mapping[str, int]) -> None:
        """What left the device for the store so far, by component."""
        if slots != self._slots_seen:
            for component, total in slots.items():
                self._slots.labels(component).inc(total - self._slots_seen[component])
            self._slots_seen = Counts(slots)

    def tidied(self, counts: Mapping[str, int]) -> None:
        """What the store's upkeep has done so far."""
        if counts == self._upkeep_seen:
            return
        for step, total in counts.items():
            self._upkeep.labels(step).inc(total - self._upkeep_seen[step])
        self._upkeep_seen = Counts(counts)
