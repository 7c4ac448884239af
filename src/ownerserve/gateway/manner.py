"""Which turns are sent unasked, and what is asked for the others. Pure.

A direct append goes where its state is, at once: the worker judges it as it arrives, before any
work. Every other turn asks for its place first. One that all refused for want of room is sent
without a promise and waits in the best worker's queue.
"""

from __future__ import annotations

from enum import StrEnum

from ownerserve.gateway.http.heads import RequestHead
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.wire.rpc import Seed
from ownerserve.router.decision import TurnClass
from ownerserve.router.messages import Dispatch
from ownerserve.router.sessions import SessionTable

TURNS = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages")
MARGIN = 1.25
"""A prompt's tokens are estimated from its bytes; one that is longer than its place is judged anew
as it arrives."""
OUTPUT_TOKENS = 1024
"""Asked for the answer of a session that has not answered yet."""

_APPENDS = (TurnClass.DECODE_CONTINUATION, TurnClass.SMALL_INCREMENT, TurnClass.LONG_TOOL_OUTPUT)
_ON_THE_SPOT = (PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION)


class Manner(StrEnum):
    """How a request deals with workers' admission."""

    ASKING = "asking"
    """The request asks first; a direct append is judged on its arrival."""
    UNASKED = "unasked"
    """The request takes its chance in a queue."""


def is_turn(head: RequestHead) -> bool:
    """Whether a request is a session's turn: a listing needs no place."""
    return head.method == b"POST" and head.target.startswith(TURNS)


def is_direct_append(dispatch: Dispatch) -> bool:
    """Whether the worker should have the session's state on its device."""
    decision = dispatch.decision
    return (
        decision.cached_tokens > 0
        and dispatch.turn in _APPENDS
        and decision.action in _ON_THE_SPOT
        and not decision.moved_tokens
    )


def seed_of(dispatch: Dispatch, sessions: SessionTable) -> Seed:
    """The place that a turn needs."""
    known = None if dispatch.session is None else sessions.get(dispatch.session)
    output = known.output_tokens if known is not None else 0.0
    return Seed(
        int(dispatch.prompt_tokens * MARGIN) + 1,
        output_tokens=int(output * MARGIN) + 1 if output else OUTPUT_TOKENS,
    )
