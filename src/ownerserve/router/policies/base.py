"""The policy interface.

A policy is asked once for each request that arrives, chooses among `candidates` (never empty, all
up, in stable order) and says why. It reads, it never counts load and never binds a session: the
state does both, in the same way for every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.fleet import Worker
from ownerserve.router.messages import Reason


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as a policy sees it."""

    session: SessionId | None
    owner: WorkerId | None
    """Where the session ran last, if that worker still lives."""
    turns: int
    """Earlier requests of the session that were dispatched."""
    prompt_tokens: int
    """Estimated."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A worker, and why."""

    worker: Worker
    reason: Reason


class Policy(Protocol):
    """Chooses a worker. May keep state of its own, fed by its own choices only."""

    def choose(self, request: Request, candidates: Sequence[Worker]) -> Choice: ...
