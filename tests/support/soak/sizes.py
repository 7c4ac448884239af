"""What a fleet's members hold, sampled from /proc, from their folders and from what they say; and
whether it stays flat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.errors import PeerLost
from ownerserve.kv.units import KIB, MIB
from tests.support.kills.processes import Fleet, metric

SLACK = {
    "rss_bytes": 48 * MIB,
    "descriptors": 24,
    "threads": 12,
    "disk_bytes": 320 * MIB,  # a segment is taken whole, whenever its first record comes
    "prefixes": 200,
    "holders": 2,
}
"""By so much the end of a run may lie above its begin: allocators, pools and what is in flight. A
leak passes it in a run that is long enough. Sessions are no trend: whoever is killed may take a
session's end along, and `soak` counts them against the faults."""
PARTS = 3
"""The first of so many parts of a run is compared with the last."""
FEWEST = 2 * PARTS


class Place(NamedTuple):
    """Whose size it is, and which."""

    member: str
    kind: str


class Grown(NamedTuple):
    """A size that did not stay flat: its medians in the first and the last part of a run."""

    place: Place
    first: float
    last: float

    def __str__(self) -> str:
        at = f"{self.place.member}'s {self.place.kind}"
        return f"{at} grew from {self.first:.0f} to {self.last:.0f}"


Sizes = dict[Place, float]


def sample(fleet: Fleet, folder: Path) -> Sizes:
    """All sizes now, while all members live. Raises OSError, HTTPError or PeerLost when one does
    not."""
    sizes: Sizes = {}
    for name, member in fleet.members.items():
        for kind, size in of_process(member.pid).items():
            sizes[Place(name, kind)] = size
    for worker in fleet.workers:
        sizes[Place(worker.name, "disk_bytes")] = disk_bytes(folder / worker.name)
        sizes[Place(worker.name, "sessions")] = worker.metric("ownerserve_sessions_owned")
    gateway_sessions = metric(fleet.admins[0], "ownerserve_gateway_sessions")
    sizes[Place("gateway", "sessions")] = gateway_sessions
    client = DirectoryClient(fleet.directory)
    try:
        records = client.status().records
    finally:
        client.close()
    if records is None:
        raise PeerLost("the directory does not say how many records it has")
    sizes[Place("directory", "sessions")] = records.sessions
    sizes[Place("directory", "prefixes")] = records.prefixes
    sizes[Place("directory", "holders")] = records.holders
    return sizes


FLEETING = (OSError, httpx.HTTPError, PeerLost)
"""What `sample` raises of a member that dies meanwhile."""


def of_process(pid: int) -> dict[str, int]:
    """A process's resident memory, open descriptors and threads."""
    said = Path(f"/proc/{pid}/status").read_text()
    return {
        "rss_bytes": int(said.partition("VmRSS:")[2].split()[0]) * KIB,
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "threads": int(said.partition("Threads:")[2].split()[0]),
    }


def disk_bytes(folder: Path) -> int:
    """What a folder's files take on the disk: holes take nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def grown(samples: Sequence[Sizes]) -> list[Grown]:
    """The sizes that did not stay flat. Raises ValueError of fewer samples than say anything."""
    if len(samples) < FEWEST:
        raise ValueError(f"{len(samples)} samples say nothing of a trend: at least {FEWEST}")
    part = len(samples) // PARTS
    found = []
    for place in (one for one in samples[0] if one.kind in SLACK):
        first = statistics.median(one[place] for one in samples[:part])
        last = statistics.median(one[place] for one in samples[-part:])
        if last > first + SLACK[place.kind]:
            found.append(Grown(place, first, last))
    return found
