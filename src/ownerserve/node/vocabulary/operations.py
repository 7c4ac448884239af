"""An operation is one thing that a node has asked for and that has not ended; each has a number and
an owner. Pure.

    owner ── begin ──> id ── effect ──> performer ── completion ──> complete ──> the same owner
      `── end: answered, or given up ──> what comes later under this id is nobody's

A completion comes late, twice or not at all. It goes to the owner of its operation alone; one whose
operation has ended changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Protocol

from ownerserve.node.vocabulary.events import Completion, Effect, OperationId


class Owner(Protocol):
    """An `Owner` is a part of a node that begins operations and handles their completions."""

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the answer to one of the owner's operations; return the effects that follow."""
        ...


class Operations:
    """`Operations` holds the operations of one node that have not ended: it hands out their ids and
    knows their owners.

    An id is never given out again. Owners end their operations themselves, since one may take
    several completions (a `Fetch` goes on as its `Fill`).
    """

    def __init__(self) -> None:
        self._ids = count(1)
        self._owners: dict[OperationId, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, owner: Owner) -> OperationId:
        """Register a new operation of `owner` and return its id."""
        operation_id = next(self._ids)
        self._owners[operation_id] = owner
        return operation_id

    def end(self, operation_id: OperationId) -> None:
        """Forget the operation, which was answered or given up. Ending it twice is harmless."""
        self._owners.pop(operation_id, None)

    def complete(self, event: Completion, now: float) -> list[Effect]:
        """Hand the completion to the owner of its operation and return the effects that follow;
        none for an operation that has ended."""
        owner = self._owners.get(event.operation_id)
        return [] if owner is None else list(owner.completed(event, now))

    def go_on_from(self, other: Operations) -> None:
        """Hand out ids from where `other` stopped, so that answers to its operations are not taken
        for answers to these."""
        self._ids = other._ids
