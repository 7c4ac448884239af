"""The account of all requests so far: what came in, how it ended, and why.

Owns the counts; they only grow. Invariant 3: received = done + rejected + live.
"""

from __future__ import annotations

from collections import Counter

from ownerserve.router.messages import Down, Failure, Reason, Refusal


class Account:
    """Counts since the state was made."""

    __slots__ = (
        "aborted",
        "broken",
        "downs",
        "failures",
        "finished",
        "reasons",
        "received",
        "refusals",
        "usages_refused",
    )

    def __init__(self) -> None:
        self.received = 0
        self.finished = 0
        self.broken = 0
        self.aborted = 0
        self.usages_refused = 0
        """Answers whose counts no sequence can have."""
        self.reasons: Counter[Reason] = Counter()
        self.refusals: Counter[Refusal] = Counter()
        self.failures: Counter[Failure] = Counter()
        self.downs: Counter[Down] = Counter()

    @property
    def done(self) -> int:
        """Requests whose last dispatch ended, well or not."""
        return self.finished + self.broken + self.aborted

    @property
    def rejected(self) -> int:
        """Requests that were refused, at arrival or after failed attempts."""
        return self.refusals.total()
