"""A transaction is what a decision comes to: an outcome and the records that it writes.

    decide(records, request, moment) -> Transaction(outcome, writes, guards, minted)

The backend commits a transaction when every record in `writes` and `guards` is still as it was
read, else it reads again and decides again. `moment.epoch` is the epoch to use for a grant;
`minted` says that it was used.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ownerserve.directory.decisions.records import Key, Record, Records
from ownerserve.directory.messages import DirectoryRefusal, Outcome, Refused
from ownerserve.kv.messages import Epoch

Writes: TypeAlias = tuple[tuple[Key, Record | None], ...]
"""Records by key, each as it is to be written; None: it is to be deleted."""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A moment is when a decision is made, by the directory's clock, and with which lease and
    epoch. `open_at_s`: until then a directory without memory makes no new owner.
    """

    now_s: float
    lease_s: float
    open_at_s: float
    epoch: Epoch


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """A transaction is an outcome, and what must be written for it. `guards` were only read, but
    the outcome stands or falls with them; `minted`: the moment's epoch is used up.
    """

    outcome: Outcome
    writes: Writes = ()
    guards: tuple[Key, ...] = ()
    minted: bool = False


class TransactionDraft:
    """A draft holds records as a decision has left them so far. Owns its writes; never changes what
    is below it.
    """

    __slots__ = ("_below", "changed")

    def __init__(self, below: Records) -> None:
        self._below = below
        self.changed: dict[Key, Record | None] = {}

    def get(self, key: Key) -> Record | None:
        """Return the record under `key` as the draft has left it; None when there is none."""
        if key in self.changed:
            return self.changed[key]
        return self._below.get(key)

    def put(self, key: Key, record: Record | None) -> None:
        """Write the record under `key`; None: delete it."""
        self.changed[key] = record

    def decided(self, outcome: Outcome, *, guards: tuple[Key, ...] = ()) -> Transaction:
        """Return the transaction of what was drafted. No epoch is used up."""
        return Transaction(outcome, tuple(self.changed.items()), guards)

    def granted(self, outcome: Outcome, *, guards: tuple[Key, ...] = ()) -> Transaction:
        """Return the transaction of what was drafted, with the moment's epoch used up."""
        return Transaction(outcome, tuple(self.changed.items()), guards, minted=True)


def refuse(reason: DirectoryRefusal, *, retry_after_s: float = 0.0) -> Transaction:
    """Return the transaction that refuses the request, and changes nothing."""
    return Transaction(Refused(reason, retry_after_s))


def refuse_until_open(at: Moment) -> Transaction:
    """Return the transaction that refuses the request until new epochs may be issued."""
    return refuse(DirectoryRefusal.REBUILDING, retry_after_s=max(0.0, at.open_at_s - at.now_s))
