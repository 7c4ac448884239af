"""What a node's transfers count, and the names by which every kind of worker tells it.

    Peers, TargetSide          what was asked of peers, and brought    in the process that brings
    SourceSide, StoredLends    what was lent                           in the process that lends

An engine in one process has all of them; vLLM brings in its worker's, and looks and lends in its
scheduler's. So counts are joined under one name, and each stands in them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ownerserve.node.transfers.landings import LandingNumbers
from ownerserve.transfer.movers.arena import ArenaNumbers


class BringCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`BringCounts` are what was asked of peers and brought since the start, by how it ended."""

    looks: Mapping[str, int]
    brings: Mapping[str, int]
    brought_bytes: Mapping[str, int]
    read_bytes: int
    read_failures: Mapping[str, int]


class TransferCounts(BringCounts, frozen=True, kw_only=True):
    """`TransferCounts` are also what was lent, ordered and computed for others since the start,
    and the levels now."""

    lends: Mapping[str, int]
    staged_bytes: int
    failed_stagings: int
    orders: Mapping[str, int]
    ordered_bytes: Mapping[str, int]
    prefills: Mapping[str, int]
    told_bytes: Mapping[str, int]
    moves: Mapping[tuple[str, str], int]
    """By `came` and `went`, and how each ended."""
    handover_s: float
    """For how long the sessions that came were nobody's to serve, in all, at most."""
    turn_moves: Mapping[tuple[str, str], int]
    """The same, of turns amid their answers."""
    turn_states: Mapping[str, int]
    turn_state_bytes: int
    """State of these turns that came before they were stopped."""
    replicas: Mapping[str, int]
    replica_bytes: int
    connections: int
    stage_used_bytes: int
    landings: LandingNumbers
    arena: ArenaNumbers | None
    """None: no road needs one."""


class TransferCounter(msgspec.Struct, frozen=True, gc=False):
    """A `TransferCounter` is a counter that every worker has whose node reads of peers or lends:
    its name without `_total`, what it is, the field of the counts, and its one label, if any."""

    name: str
    about: str
    of: str
    label: str = ""


COUNTED = (
    TransferCounter(
        "ownerserve_peer_looks",
        "Peers asked what they hold of a turn's session: found, nothing, parted (other tokens"
        " than the prompt's), silent (no answer in time), or why its ranks and ours do not fit"
        " (transfer.layout.shards.Misfit).",
        "looks",
        label="answer",
    ),
    TransferCounter(
        "ownerserve_brought",
        "Brings of state from a peer, by how they ended: brought, stopped (nobody waits any more),"
        " or why nothing came (transfer.control.events.BringEnd).",
        "brings",
        label="end",
    ),
    TransferCounter(
        "ownerserve_brought_bytes",
        "Bytes of state that came from peers and counted, by road: shm, readv, tcp, mooncake,"
        " nixl.",
        "brought_bytes",
        label="road",
    ),
    TransferCounter(
        "ownerserve_peer_read_bytes",
        "Bytes that were read of peers, also those that did not count in the end.",
        "read_bytes",
    ),
    TransferCounter(
        "ownerserve_peer_read_failures",
        "Reads of peers that brought nothing, by why (transfer.vocabulary.ReadFailure); one that"
        " failed is tried again, or by the next road.",
        "read_failures",
        label="reason",
    ),
    TransferCounter(
        "ownerserve_lends",
        "Lends to peers, by how they ended: returned, expired (nobody read), revoked (a turn"
        " needed the room), cancelled, or why nothing was lent.",
        "lends",
        label="end",
    ),
    TransferCounter(
        "ownerserve_staged_bytes",
        "Bytes read of host memory and disk to be lent to peers.",
        "staged_bytes",
    ),
    TransferCounter(
        "ownerserve_staging_failures",
        "Reads of host memory and disk for peers that gave nothing: the lend ended short.",
        "failed_stagings",
    ),
)


def counted(counts: BringCounts, metric: TransferCounter) -> dict[str, int]:
    """Return what the metric counts by the values of its label, "" where it has none; nothing
    where these counts are of a process that does no such thing."""
    found = getattr(counts, metric.of, {})
    return {"": found} if isinstance(found, int) else dict(found)


def named(counts: BringCounts) -> dict[str, int]:
    """Return all counts that are not 0 by name, for who adds up those of several processes:
    "ownerserve_brought:refused", "ownerserve_staged_bytes:"."""
    return dict(_named(counts))


def parse_name(name: str) -> tuple[str, str]:
    """Return the metric, and the value of its label, that a name of `named` stands for."""
    metric, _, value = name.partition(":")
    return metric, value


def _named(counts: BringCounts) -> Iterator[tuple[str, int]]:
    for metric in COUNTED:
        for value, count in counted(counts, metric).items():
            if count:
                yield f"{metric.name}:{value}", count
