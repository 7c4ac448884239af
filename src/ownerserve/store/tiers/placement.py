"""Placement decides between tiers: where a record is written, what is worth a write further down,
what goes up. Pure.

Levels count from the fastest tier, 0. A write policy is one of three, none of them a flag:

    policy           acknowledged by      and then
    OnEviction       the top              goes down when it must make room, if worth it
    WriteBack(n)     the top              copied to level n in `settle`, if worth it
    WriteThrough(n)  level n: durable     a copy above it, which may be refused without harm
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ownerserve.kv.units import MIB
from ownerserve.store.format.model import ArtifactKind, Listed, RefusalReason


class WritePlan(NamedTuple):
    """A write plan names the levels of one write: `home` answers, or the next of `overflow` that
    has room when it has none; `with_it` get a copy before the answer, `later` one in `settle`.
    """

    home: int
    overflow: tuple[int, ...] = ()
    with_it: tuple[int, ...] = ()
    later: int | None = None


class OnEviction(msgspec.Struct, frozen=True, tag=True):
    """OnEviction makes the fewest writes; what was acknowledged is gone with the process until it
    went down.
    """

    def plan(self, levels: int) -> WritePlan:
        """Return a plan that writes to the top; a top without room passes it on."""
        return WritePlan(0, overflow=tuple(range(1, levels)))


class WriteBack(msgspec.Struct, frozen=True, tag=True):
    """WriteBack acknowledges at memory speed; a crash before `settle` loses the record (a miss,
    never wrong).
    """

    level: int = 1

    def plan(self, levels: int) -> WritePlan:
        """Return a plan that writes to the top, as OnEviction's, and makes a copy at `level`
        later.
        """
        later = min(self.level, levels - 1)
        return WritePlan(0, overflow=tuple(range(1, levels)), later=later or None)


class WriteThrough(msgspec.Struct, frozen=True, tag=True):
    """WriteThrough acknowledges what is durable. There is no overflow: a refusal by the durable
    level is the answer.
    """

    level: int = 1

    def plan(self, levels: int) -> WritePlan:
        """Return a plan that writes to the durable level, then makes a copy on top."""
        home = min(self.level, levels - 1)
        return WritePlan(home, with_it=(0,) if home else ())


WritePolicy = OnEviction | WriteBack | WriteThrough


class Placement(msgspec.Struct, frozen=True):
    """A placement is a write policy, and what a move between tiers must be worth.

    A record is worth the milliseconds it saves, by use so far, for each MiB it costs to write.
    Thresholds are 0 (all goes down) until the node prices its artifacts; point state has its own,
    since it is big, short-lived and written every turn (V4.1: half of persistent KV).
    """

    range_ms_per_mib: float = 0.0
    point_ms_per_mib: float = 0.0
    promote_after_reuses: int = 1
    write: WritePolicy = OnEviction()

    def goes_down(self, record: Listed) -> bool:
        """Tell whether to write it to the next tier before it leaves this one."""
        ranged = record.meta.kind is ArtifactKind.RANGE
        threshold = self.range_ms_per_mib if ranged else self.point_ms_per_mib
        value_ms = (1 + record.reuse_count) * record.restore_cost_ms
        return value_ms >= threshold * record.stored_bytes / MIB

    def goes_up(self, record: Listed) -> bool:
        """Tell whether to copy it to the top tier after it was read further down."""
        return record.reuse_count >= self.promote_after_reuses


HAS_NO_ROOM = frozenset(
    {RefusalReason.NO_SPACE, RefusalReason.QUOTA, RefusalReason.TOO_LARGE, RefusalReason.BUSY}
)
"""Refusals after which the next level is asked: the tier's room fails, not the record."""

COMES_AGAIN = frozenset({RefusalReason.BUSY, RefusalReason.IO_ERROR, RefusalReason.WRITE_BUDGET})
"""Refusals that pass with time: a write-back waits for the next `settle`."""
