"""This module keeps the account of all requests so far: what came in, how it ended, and why.

Owns the counts; they only grow. Invariant 3: received + second legs = done + rejected + live + legs
that ended before their turn did.

`audit` compares the router's books with what they were made from (invariant 5): for tests and
`check()`, never on a request's path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.router.decision import DispatchReason
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Down, Failure, Refusal
from ownerserve.router.sessions import SessionTable
from ownerserve.router.worker import Load, Receipt, Worker


class Account:
    """The account counts a RouterState's requests, and what became of them, since the state was
    made."""

    __slots__ = (
        "aborted",
        "broken",
        "downs",
        "failures",
        "finished",
        "legs_begun",
        "legs_ended",
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
        self.legs_begun = self.legs_ended = 0
        """Second legs of turns, and legs that ended while the other one of their turn went on."""
        self.usages_refused = 0
        """Answers whose counts no sequence can have."""
        self.reasons: Counter[DispatchReason] = Counter()
        self.refusals: Counter[Refusal] = Counter()
        self.failures: Counter[Failure] = Counter()
        self.downs: Counter[Down] = Counter()

    @property
    def done(self) -> int:
        """The account counts as done the requests whose last dispatch ended, well or not."""
        return self.finished + self.broken + self.aborted

    @property
    def rejected(self) -> int:
        """The account counts as rejected the requests that were refused, at arrival or after failed
        attempts."""
        return self.refusals.total()


class Books(msgspec.Struct, frozen=True):
    """The books list what the state counts of its live dispatches: the load of each at its workers,
    and the receipts whose worker has not begun to answer."""

    loads: Sequence[tuple[Worker, Load]]
    unanswered: Collection[Receipt]


def audit(fleet: Fleet, sessions: SessionTable, books: Books) -> None:
    """Raise InvariantViolated unless ledgers, bindings, references and orders agree."""
    bound = Counter(
        session.home
        for _, session in sessions.items()
        if session.home is not None and session.home.life == session.home_life
    )
    for worker in fleet:
        own = [load for where, load in books.loads if where is worker]
        expected = (
            len(own),
            sum(load.prefill_tokens for load in own),
            sum(load.held_tokens for load in own),
            bound[worker],
        )
        counted = (
            worker.requests,
            worker.pending_prefill_tokens,
            worker.held_tokens,
            worker.bound_sessions,
        )
        if counted != expected:
            raise InvariantViolated(f"invariant 5: {worker.id} has {counted}, not {expected}")
    _check_homes(sessions, books)
    _check_references(sessions)
    fleet.check()


def _check_homes(sessions: SessionTable, books: Books) -> None:
    """Raise InvariantViolated unless each session's home is its owner, except while a dispatch of
    it is unanswered."""
    for name, session in sessions.items():
        if session.heading is None:
            if (session.home, session.home_life) != (session.owner, session.owner_life):
                raise InvariantViolated(f"invariant 5: {name} has a home that nothing leads to")
        elif session.heading not in books.unanswered:
            raise InvariantViolated(f"invariant 5: {name} waits for a dispatch that is over")


def _check_references(sessions: SessionTable) -> None:
    """Raise InvariantViolated unless each prefix's `refs` is the number of sessions that stand on
    it: copy-on-write rests on that."""
    standing = [prefix for _, session in sessions.items()
                for prefix in (session.prefix, session.stem) if prefix is not None]  # fmt: skip
    counted = Counter(map(id, standing))
    for prefix in standing:
        if prefix.refs != counted[id(prefix)]:
            raise InvariantViolated(
                f"invariant 5: {counted[id(prefix)]} sessions stand on a prefix that counts "
                f"{prefix.refs}"
            )
