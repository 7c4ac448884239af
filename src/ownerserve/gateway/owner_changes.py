"""This module remembers which sessions changed their owner, for people: the newest, and how many in
all."""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal, TypeAlias

import msgspec

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.worker import Worker

KEPT = 100

Heard: TypeAlias = Literal["answered", "told"]
"""How a change was heard of: another worker began to answer, or a worker or the directory told."""


class OwnerChange(msgspec.Struct, frozen=True, gc=False):
    """A change of owner is the session's going from one worker to another, at `at_s`."""

    at_s: float
    session: SessionId
    former: WorkerId
    owner: WorkerId
    how: Heard


class OwnerChanges:
    """The changes are those that the gateway saw, the newest `KEPT` of them with their names."""

    def __init__(self) -> None:
        self.counts: Counter[Heard] = Counter()
        self.newest: deque[OwnerChange] = deque(maxlen=KEPT)

    def look(
        self,
        session: SessionId,
        former: Worker | None,
        owner: Worker | None,
        *,
        how: Heard,
        now_s: float,
    ) -> None:
        """Count a change, if this is one; that a session gets its first owner is none, nor that its
        owner begins another life."""
        if former is None or owner is None or owner is former:
            return
        self.counts[how] += 1
        self.newest.append(OwnerChange(now_s, session, former.id, owner.id, how))
