"""How a process of a host is named to another one: what goes over the wire of it."""

from __future__ import annotations

import msgspec


class ProcessName(msgspec.Struct, frozen=True):
    """A `ProcessName` is one life of one process.

    `boot` is the host's boot id, `pid_space` the inode of its pid namespace: a `pid` means nothing
    elsewhere. `started_ticks` is when it began (clock ticks since boot, /proc/PID/stat's field 22):
    a pid is given again, with another begin.
    """

    boot: str
    pid_space: int
    pid: int
    started_ticks: int
