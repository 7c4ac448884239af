"""This module holds what is counted over a whole run, and the moves of sessions. Must never hold a
time series."""

from __future__ import annotations

import msgspec


class Migration(msgspec.Struct, frozen=True, gc=False):
    """A migration is one move of a conversation's state and ownership, as it ended (`completed` 0:
    given up).

    `conversation` tells a session's agents apart ("s12/a3"). `landed_s`: its state was all at the
    target, or the transfer was given up; `done_s`: the turn that asked for it ended there.
    """

    session: int
    conversation: str
    source: int
    target: int
    decided_s: float
    landed_s: float
    done_s: float
    bytes: int
    completed: int = 1


class GapCounters(msgspec.Struct):
    """The gap counters say how moves between turns, and replicas of hot prefixes, ended, by how;
    `moved_bytes` crossed for both."""

    moves: dict[str, int] = {}
    replicas: dict[str, int] = {}
    moved_bytes: int = 0

    @property
    def any(self) -> bool:
        """`any` tells whether one was granted."""
        return bool(self.moves or self.replicas)


class FleetCounters(msgspec.Struct):
    """The counters are sums over all workers and the whole run; the fleet adds to them.

    `steps` engine iterations. Decode interference: over all steps, `decode_alone_ms` adds (time of
    the step had it carried no prefill) x (sequences decoding in it), `decode_stall_ms` adds (actual
    time - that) x (sequences decoding in it). `ssd_new_bytes`: payload that was not yet on the SSD
    tier; `ssd_written_bytes`: what its device wrote (headers, rewrites, compaction included).
    `turns_released` and `sessions_released` of the workload; `completed`: the sessions (by index)
    whose last turn ended, whatever its outcome. `migrations` are those that a turn waited for;
    `in_gaps`: what was moved for none.
    """

    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    evicted_blocks: int = 0
    evicted_tokens: int = 0
    wanted_tokens: int = 0
    decode_alone_ms: float = 0.0
    decode_stall_ms: float = 0.0
    ssd_new_bytes: int = 0
    ssd_written_bytes: int = 0
    ssd_read_bytes: int = 0
    turns_released: int = 0
    sessions_released: int = 0
    completed: list[int] = []
    migrations: list[Migration] = []
    in_gaps: GapCounters = msgspec.field(default_factory=GapCounters)
