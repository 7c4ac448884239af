"""Directory is the port that its callers see, wherever its memory lies. One contract suite over
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ownerserve.directory.messages import Outcome, Request
from ownerserve.kv.messages import Term

LEASE_S = 30.0
"""A unit's lease. Long enough that an idle unit asks once in 10 s, for frames are what many units
cost. For so long a dead owner's sessions are served by guests, which are as fast and tell
nothing."""


SWEEP_IDLE_S = 24 * 3600.0
"""How long a session may go without a turn: its owner then ends it, or the sweep where no owner
lives."""


class RecordCounts(msgspec.Struct, frozen=True):
    """Record counts say how many records of each kind are known."""

    holders: int
    sessions: int
    prefixes: int
    groups: int


class DirectoryStatus(msgspec.Struct, frozen=True):
    """A directory's status says how it is. `opens_in_s` above 0: it is rebuilding. `term` None: its
    memory cannot be reached. `keys`: records in all, where a shared backend does not count each
    kind.
    """

    backend: str
    term: Term | None
    issued: int
    opens_in_s: float
    lease_s: float
    records: RecordCounts | None
    keys: int | None = None
    lost_copies: int = 0
    """Prefixes that sessions stand on whose last copy was told as gone, since the service began."""
    asked: dict[str, int] = {}
    """Requests by type since the service began."""


class Directory(Protocol):
    """A directory takes requests and gives their outcomes in order. `execute` never raises for what
    a backend or a network does: what could not be done is `Refused`.
    """

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Decide on the requests in order; returns one outcome for each."""
        ...

    def status(self) -> DirectoryStatus:
        """Return how the directory is."""
        ...

    def sweep(self, limit: int) -> int:
        """Clean up behind units and sessions that never ended; looks at `limit` records at most,
        and says how many it changed."""
        ...

    def forget(self) -> DirectoryStatus:
        """Lose all memory on purpose and start a new term: workers fill it from inventories."""
        ...

    def close(self) -> None:
        """Let go of connections; the directory's memory stays."""
        ...
