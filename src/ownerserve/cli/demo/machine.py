"""This module reads how busy the machine is with what is not the demo's.

Linux says it under /proc; where that or the load average is not to be had nothing is known, and
nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

PROC = Path("/proc")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""The busy fields of the first line of /proc/stat: user, nice, system, irq, softirq, and steal,
which other guests of the host took. Guests of this machine are in user and nice already."""
IDLE_FIELDS = (3, 4)


class CpuTicks(msgspec.Struct, frozen=True):
    """CPU ticks are counts since the boot: of all CPUs, those of them that were busy, and those
    that some processes took."""

    total: int
    busy: int
    ours: int


def load_average() -> float | None:
    """Return how many processes wanted a core, a mean of the last minute."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def cpu_ticks(pids: Collection[int], *, proc: Path = PROC) -> CpuTicks | None:
    """Return the machine's ticks until now, and those of the processes `pids`; None where it does
    not say, or one of these has ended."""
    try:
        fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(fields[at]) for at in BUSY_FIELDS)
        total = busy + sum(int(fields[at]) for at in IDLE_FIELDS)
        return CpuTicks(total, busy, sum(_ticks_of(pid, proc) for pid in pids))
    except (OSError, ValueError, IndexError):
        return None


def others_share(before: CpuTicks | None, after: CpuTicks | None) -> float | None:
    """Return the share of the machine's CPU that others took between two readings of the same
    processes."""
    if before is None or after is None or after.total <= before.total:
        return None
    taken = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0, taken) / (after.total - before.total)


def _ticks_of(pid: int, proc: Path) -> int:
    """Return what a process has taken, all its threads, in user and system time."""
    after_name = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])
