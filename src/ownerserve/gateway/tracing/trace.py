"""A trace is what a turn brings of W3C trace context, what its worker is told of it, and, where
traces are exported, what is recorded of the turn's steps (otel.py).

Without an exporter nothing is recorded here: a context that comes goes on with a span id of this
gateway's, and a request without one has no trace at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol

from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.trace_context import TraceContext, new_span_id, read_trace
from ownerserve.kv.ids import SessionId
from ownerserve.router.messages import Dispatch, Refuse
from ownerserve.router.requests.body import BodyFields, Usage


class TurnStep(StrEnum):
    """A step is what a turn does at a time; each is a span."""

    QUEUE = "queue"
    """The directory is asked whose session it is, and the turn waits before the fleet."""
    DECIDE = "decide"
    PLACE = "place"
    """The worker is asked for a place."""
    CONNECT = "connect"
    FIRST_BYTE = "first byte"
    """Sent, and nothing of the answer came."""
    RELAY = "relay"


class LegTrace(Protocol):
    """A leg's trace is told of what is done with one dispatch of the turn."""

    def lines(self) -> bytes:
        """Return the header lines by which the worker's part joins the trace."""
        ...

    def step(self, step: TurnStep) -> None:
        """End the leg's present step, and begin another."""
        ...

    def answered(self, status: int) -> None:
        """Hear the status of the answer, which is relayed from here on."""
        ...


class TurnTrace(Protocol):
    """A turn's trace has ids, and is told of the turn's steps, in their order."""

    @property
    def trace_id(self) -> str:
        """`trace_id` is the whole trace's: 32 hex digits."""
        ...

    def asked(self, fields: BodyFields) -> None:
        """Hear what the request's body says of itself."""
        ...

    def deciding(self, lost: Dispatch | None, why: str) -> None:
        """Begin to decide, for the first time or after a dispatch that was `lost`."""
        ...

    def decided(
        self, request_id: bytes, session: SessionId | None, outcome: Dispatch | Refuse
    ) -> None:
        """Hear what was decided, under which ids."""
        ...

    def leg(self, dispatch: Dispatch) -> LegTrace:
        """Return the part of one dispatch."""
        ...

    def ended(self, end: str, usage: Usage | None = None) -> None:
        """End the turn's part here, as `end` says; once it has ended, do nothing."""
        ...

    def refused(self, request_id: bytes, rejected: Rejected) -> None:
        """End the part of a request that is told no before anything of it was decided."""
        ...


class BegunRequest(Protocol):
    """A begun request is what a trace begins by."""

    @property
    def method(self) -> bytes:
        """`method` is empty where it was not read."""
        ...

    @property
    def target(self) -> bytes:
        """`target` is empty where it was not read."""
        ...

    @property
    def special(self) -> Mapping[bytes, bytes]:
        """`special` are its lower-case headers, the trace's among them."""
        ...


class Tracer(Protocol):
    """A tracer begins the traces of turns."""

    def begin(self, head: BegunRequest) -> TurnTrace | None:
        """Return the trace of a request; None: it has none."""
        ...

    def close(self) -> None:
        """Send what is recorded, and end. It may block for some seconds."""
        ...


class FollowedTrace:
    """A followed trace is passed on, and nothing is recorded of the part here."""

    __slots__ = ("_context", "_span_id")

    def __init__(self, context: TraceContext, span_id: str) -> None:
        self._context = context
        self._span_id = span_id

    @property
    def trace_id(self) -> str:
        """The client's trace, or the new one in place of a malformed one."""
        return self._context.trace_id

    def lines(self) -> bytes:
        """Return the context's lines, with the span id of this gateway's part."""
        return self._context.lines(self._span_id)

    def leg(self, dispatch: Dispatch) -> LegTrace:
        """Return the same for every dispatch."""
        return self

    def step(self, step: TurnStep) -> None:
        """Record nothing."""

    def answered(self, status: int) -> None:
        """Record nothing."""

    def asked(self, fields: BodyFields) -> None:
        """Record nothing."""

    def deciding(self, lost: Dispatch | None, why: str) -> None:
        """Record nothing."""

    def decided(
        self, request_id: bytes, session: SessionId | None, outcome: Dispatch | Refuse
    ) -> None:
        """Record nothing."""

    def ended(self, end: str, usage: Usage | None = None) -> None:
        """Record nothing."""

    def refused(self, request_id: bytes, rejected: Rejected) -> None:
        """Record nothing."""


class FollowingTracer:
    """The following tracer records nothing: it is the gateway's without an exporter."""

    def begin(self, head: BegunRequest) -> TurnTrace | None:
        """Return the trace that the request brings; None: it brings none."""
        return followed(head.special)

    def close(self) -> None:
        """Have nothing to send."""


def followed(headers: Mapping[bytes, bytes]) -> FollowedTrace | None:
    """Return the trace that a request's lower-case headers bring; None: they bring none."""
    context = read_trace(headers)
    return None if context is None else FollowedTrace(context, new_span_id())


def is_failure(status: int) -> bool:
    """Return whether a span with this status says that something failed here or behind."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR
