"""DirectoryState is the directory in one process's memory, without a clock: requests with `now` ->
outcomes.

Owns all records, the term and its counter. Never draws a number and never writes a file: a new
term is handed in by whoever runs it (embedded.py, the simulator).

    REBUILDING --open_at_s is reached--> OPEN
    any        --start_term(...)-------> REBUILDING until the longest lease of before has run out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.decide import decide
from ownerserve.directory.decisions.records import (
    GroupRecord,
    HolderRecord,
    Key,
    PrefixRecord,
    Record,
    SessionRecord,
    prefix_key,
)
from ownerserve.directory.decisions.sweep import sweep
from ownerserve.directory.decisions.transaction import Moment, Transaction
from ownerserve.directory.messages import Outcome, Request
from ownerserve.directory.port import SWEEP_IDLE_S, RecordCounts
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.messages import Epoch, Term


class DirectoryState:
    """A directory's state is one memory of it: all records, the term and the counter of its
    epochs.
    """

    def __init__(self, term: Term, *, lease_s: float, open_at_s: float) -> None:
        self.lease_s = lease_s
        self.term = term
        self.open_at_s = open_at_s
        self._issued = Epoch(term, 0)
        self._at: Moment | None = None
        self.records: dict[Key, Record] = {}
        """All that is known; `handle` and `sweep` alone write it."""

    def issued(self) -> Epoch:
        """Return the latest epoch of this memory."""
        return self._issued

    def is_behind(self, request: Request) -> bool:
        """Tell whether a new term must be started before this request is answered."""
        seen = getattr(request, "seen", None)
        return seen is not None and checks.is_behind(self._issued, seen)

    def start_term(self, term: Term, *, open_at_s: float) -> None:
        """Go on under a later term; what is known stays, and no new owner is made before
        `open_at_s`."""
        assert term > self.term, "terms grow"
        self.term, self.open_at_s = term, open_at_s
        self._issued, self._at = Epoch(term, 0), None

    def handle(self, request: Request, now_s: float) -> Outcome:
        """Decide on the request, write what that takes, and say the outcome."""
        at = self._moment(now_s)
        return self._apply(decide(self.records, request, at), at)

    def sweep(self, keys: Iterable[Key], now_s: float, *, idle_s: float = SWEEP_IDLE_S) -> int:
        """Clean up the records under `keys` that nobody will end; says how many changed."""
        changed = 0
        for key in keys:
            at = self._moment(now_s)
            decision = sweep(self.records, key, at, idle_s=idle_s)
            if decision.writes:
                changed += 1
                self._apply(decision, at)
        return changed

    def keys(self) -> list[Key]:
        """List the keys of all records, for a sweep."""
        return list(self.records)

    def counts(self) -> RecordCounts:
        """Count the records of each kind that are known."""
        found = Counter(type(record) for record in self.records.values())
        return RecordCounts(
            found[HolderRecord], found[SessionRecord], found[PrefixRecord], found[GroupRecord]
        )

    def check(self) -> None:
        """Check invariant 2 as far as one memory can see it; raises InvariantViolated."""
        stands_on: Counter[Key] = Counter()
        epochs: set[Epoch] = set()
        for key, record in self.records.items():
            epoch = record.epoch if isinstance(record, SessionRecord | PrefixRecord) else None
            if epoch is not None and epoch > self.issued():
                raise InvariantViolated(f"2: {key!r} has epoch {epoch} after {self.issued()}")
            if epoch is not None and epoch.term == self.term:
                if epoch in epochs:
                    raise InvariantViolated(f"2: {key!r} shares its epoch {epoch}")
                epochs.add(epoch)
            if isinstance(record, SessionRecord) and record.prefix_hash is not None:
                stands_on[prefix_key(record.prefix_hash)] += 1
        for key, record in self.records.items():
            if isinstance(record, PrefixRecord) and record.refs != stands_on[key]:
                problem = f"{key!r} counts {record.refs} forks of {stands_on[key]}"
                raise InvariantViolated(f"2: {problem}")

    def _moment(self, now_s: float) -> Moment:
        """Return the moment of a decision: the same for all that is asked at an instant, until its
        epoch is used.
        """
        at = self._at
        if at is None or at.now_s != now_s:
            epoch = Epoch(self.term, self._issued.counter + 1)
            at = self._at = Moment(now_s, self.lease_s, self.open_at_s, epoch)
        return at

    def _apply(self, decision: Transaction, at: Moment) -> Outcome:
        records = self.records
        for key, record in decision.writes:
            if record is None:
                records.pop(key, None)
            else:
                records[key] = record
        if decision.minted:
            self._issued, self._at = at.epoch, None
        return decision.outcome
