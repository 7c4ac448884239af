"""Maintenance of a store on disk: gc, compaction, purge, verification of all that stands.

Functions over a `DiskCore`; each holds the writer's lock for one bounded step at a time where it
can, so that serving goes on between the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from ownerserve.store.disk.core import DiskCore
from ownerserve.store.disk.reclaim import SPARSE_SHARE, sparse
from ownerserve.store.disk.scan import records
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import MissReason, ReadHit, ReadOutcome, Want
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.index.reader import Change, IndexEntry, SegmentSpan
from ownerserve.store.tiers.backend import EVERY_RECORD
from ownerserve.store.tiers.buffers import BufferSource

QUARANTINE_KEPT_S = 7 * 86400.0


class GcResult(msgspec.Struct):
    """What one gc did."""

    quarantine_released: int = 0
    segments_compacted: int = 0
    bytes_copied: int = 0
    segments_dropped: int = 0


def collect(
    core: DiskCore,
    landing: BufferSource,
    *,
    share: float = SPARSE_SHARE,
    kept_s: float | None = None,
    most: int = EVERY_RECORD,
) -> GcResult:
    """Release old quarantine, compact sparse segments, drop empty ones; `most` segments are
    compacted, the emptiest first."""
    done = GcResult()
    kept = QUARANTINE_KEPT_S if kept_s is None else kept_s
    with core.shielded():
        done.quarantine_released = release_quarantine(core, core.clock.now() - kept)
        done.segments_dropped = core.reclaimer.drop_empty()
        rows = sparse(core.index.segments(), share)
    for row in rows[:most] if len(rows) > 1 else []:
        with core.exclusive():
            core.flush()
            copied = core.reclaimer.compact(
                row, core.keys, landing=landing, now_ms=core.now_ms(), on_bad=core.quarantine
            )
            done.bytes_copied += copied
            done.segments_compacted += 1
            core.counters["compacted_bytes"] += copied
    return done


def release_quarantine(core: DiskCore, before_s: float, tenant: bytes | None = None) -> int:
    """Erase quarantined records older than `before_s` (of one tenant)."""
    old = [
        bad
        for bad in core.index.quarantined()
        if bad.at_ms < before_s * 1000 and tenant in (None, bad.tenant)
    ]
    core.index.release(old)
    core.reclaimer.erase([bad.span for bad in old])
    return len(old)


def purge_tenant(core: DiskCore, tenant: bytes) -> int:
    """Remove a tenant's records: indexed, quarantined, and any copy the segments still hold.

    The segments are the truth, so all their headers are read: O(records), not O(tenant's).
    """
    gone = 0
    while entries := [entry.meta.id for entry in islice(core.index.walk(tenant=tenant), 1024)]:
        gone += core.evict(entries)
    release_quarantine(core, core.clock.now() + 1, tenant)
    for number in core.home.segment_numbers():
        segment = Segment(segment_path(core.home.directory, number), os.O_RDWR)
        spans = [
            SegmentSpan(number, header.place.offset, header.record_bytes)
            for header in records(segment, BLOCK, core.home.store_id)
            if header.meta.tenant == tenant
        ]
        if spans:
            core.index.apply(Change(doom=spans))
            core.reclaimer.erase(spans)
            gone += len(spans)
    core.counters["purged"] += gone
    return gone


Read = Callable[[list[Want]], ReadOutcome]


def verify_all(
    entries: Iterator[IndexEntry], read: Read
) -> Iterator[tuple[IndexEntry, MissReason | None]]:
    """Read every record; yields what is wrong with each, None when nothing is."""
    for entry in entries:
        outcome = read([Want(entry.meta.id)])
        yield entry, None if isinstance(outcome, ReadHit) else outcome.reason
