"""What a node asked for and nobody has answered yet, by number, and whose each is. Pure.

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
    """A part of a node that asks for something and takes what comes of it."""

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """What follows from an answer to one of the owner's operations."""
        ...


class Operations:
    """The operations of one node that have not ended: hands out their ids and knows their owners.

    An id is never given out again. Owners end their operations themselves, since one may take
    several completions (a `Fetch` goes on as its `Fill`).
    """

    def __init__(self) -> None:
        self._ids = count(1)
        self._owners: dict[OperationId, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, owner: Owner) -> OperationId:
        """The id of a new operation of `owner`."""
        operation_id = next(self._ids)
        self._owners[operation_id] = owner
        return operation_id

    def end(self, operation_id: OperationId) -> None:
        """The operation is answered, or given up. Ending it twice is harmless."""
        self._owners.pop(operation_id, None)

    def complete(self, event: Completion, now: float) -> list[Effect]:
        """Hand a completion to the owner of its operation; the effects that follow."""
        owner = self._owners.get(event.operation_id)
        return [] if owner is None else list(owner.completed(event, now))

    def go_on_from(self, other: Operations) -> None:
        """Count on where `other` stopped: answers to its operations mean nothing here."""
        self._ids = other._ids
