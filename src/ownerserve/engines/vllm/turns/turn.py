"""A `TrackedRequest` is a request as the scheduler's side knows it."""

from __future__ import annotations

from typing import Any

import msgspec

from ownerserve.engines.vllm.replay.replays import ResumeAt
from ownerserve.engines.vllm.turns.prompts import HashedPrompt
from ownerserve.engines.vllm.worker_commands import Tables
from ownerserve.kv.wire.headers import NO_TURN_LINE, TurnLine, read_session_id
from ownerserve.node.vocabulary.events import RestoreReport

MAX_IN_FLIGHT = 64
"""Tokens that steps under way may be ahead of what the sequence holds: far fewer than a block."""


class TrackedRequest(msgspec.Struct, eq=False):
    """A `TrackedRequest` is a request whose state has an identity here.

    `tenant` is empty for state that all may share. `partial` are blocks that hold a window only in
    part: vLLM must not take them for whole ones. `is_told`: what came of its prompt is counted.

    Up to `hit` vLLM has range state, up to `window_hit` windows; up to `offer` state can be
    brought, and from `start` on it is computed. `resume`: where a replaying scheduler lets it go
    on; `is_promised`: vLLM has been told so. `report`: how the restore went, once it has ended.
    """

    request: Any
    tenant: bytes
    prompt: HashedPrompt | None = None
    late_s: float = 0.0
    preemptions: int = 0
    hit: int = 0
    window_hit: int = 0
    offer: int = 0
    start: int = 0
    resume: ResumeAt | None = None
    is_asked: bool = False
    is_promised: bool = False
    end: int = 0
    is_told: bool = False
    tables: Tables = ()
    partial: set[int] = msgspec.field(default_factory=set)
    report: RestoreReport | None = None

    @property
    def is_preempted(self) -> bool:
        """`is_preempted` tells whether vLLM has taken the request's blocks and not asked about it
        since: `tables` are of blocks that others may write to."""
        return bool(self.request.num_preemptions != self.preemptions)


def session_of(request: Any) -> str | None:
    """Return the session's name: a gateway's, or a client's own where no gateway stands in front;
    None: it has none."""
    return _told(request).name


def is_final(request: Any) -> bool:
    """Return whether the session ends with this turn."""
    return _told(request).final


def _told(request: Any) -> TurnLine:
    session_id = getattr(request, "session_id", None)
    return read_session_id(session_id) if session_id else NO_TURN_LINE
