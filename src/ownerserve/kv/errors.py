"""Errors are sorted by who must act.

Every message names the field (or file and line) and the mend. Foreign exceptions are mapped to
these at the boundary where they enter; `assert` is kept for our own bugs.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes from outside: damaged text and deep nests are no MsgspecError."""


class OwnerServeError(Exception):
    """OwnerServeError is the base of all errors that a caller can be expected to handle."""


class InvalidInput(OwnerServeError):
    """The user must act: a file, flag, header or field is wrong.

    `field` is the thing at fault, `problem` what is wrong with it, `mend` what to do.
    """

    def __init__(self, field: str, problem: str, mend: str) -> None:
        super().__init__(f"{field}: {problem}; {mend}")
        self.field = field
        self.problem = problem
        self.mend = mend

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, str, str]]:
        """Return all three arguments, so that the error crosses from a process of a sweep:
        Exception's own has one.
        """
        return type(self), (self.field, self.problem, self.mend)


class SpecMismatch(OwnerServeError):
    """The operator must act: two sides hold state of different identity or layout."""


class CapacityExceeded(OwnerServeError):
    """The scheduler must act: a pool, queue or budget has no room for what was asked."""


class PeerLost(OwnerServeError):
    """The runtime must act: another process or machine stopped answering."""


class Corrupt(OwnerServeError):
    """The store must act: bytes do not match their digest. They are served as a miss, never as
    data.
    """


class InvariantViolated(OwnerServeError):
    """We must act: a numbered invariant of docs/invariants.md does not hold."""
