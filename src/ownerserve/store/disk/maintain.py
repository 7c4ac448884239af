"""This module maintains a store on disk: gc, compaction, verification of all that stands.

Functions over a `DiskCore`; each holds the writer's lock for one bounded step at a time where it
can, so that serving goes on between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ownerserve.store.disk.reclaim import SPARSE_SHARE, sparse
from ownerserve.store.disk.tier import DiskCore, release_quarantine, spend
from ownerserve.store.format.model import MissReason, ReadHit, ReadOutcome, Want
from ownerserve.store.index.reader import IndexEntry, SegmentRow
from ownerserve.store.tiers.backend import EVERY_RECORD
from ownerserve.store.tiers.buffers import BufferSource

QUARANTINE_KEPT_S = 7 * 86400.0


class GcResult(msgspec.Struct):
    """A GcResult counts what one gc released, compacted and dropped."""

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
    rows: list[SegmentRow] = []
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
            spend(core, copied)
            done.bytes_copied += copied
            done.segments_compacted += 1
            core.counters["compacted_bytes"] += copied
    return done


Read = Callable[[list[Want]], ReadOutcome]


def verify_all(
    entries: Iterator[IndexEntry], read: Read
) -> Iterator[tuple[IndexEntry, MissReason | None]]:
    """Read every record; yields what is wrong with each, None when nothing is."""
    for entry in entries:
        outcome = read([Want(entry.meta.id)])
        yield entry, None if isinstance(outcome, ReadHit) else outcome.reason
