"""This module records turns as OpenTelemetry spans and sends them over OTLP/HTTP, by the official
SDK (extra `otel`); nothing else of the gateway imports that.

    SERVER  chat MODEL                      the turn, from its head's arrival to its answer's end
      queue, decide                         once more for each dispatch that was lost
      CLIENT  turn at worker                one for each dispatch; the worker's spans are below it
        place, connect, first byte, relay

Spans are made on the event loop and sent by a thread of the SDK's, in batches; what does not fit
its queue is dropped. A collector that is away costs no request anything, and is told of once.
Names of the GenAI conventions where they exist, `ownerserve.` before the rest. Sessions are named
by their digest, as everywhere, and nothing of a request's content is in a span.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from ownerserve import __version__
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.trace_context import TraceContext, read_trace
from ownerserve.gateway.logs import PATH_MAX_BYTES, tell
from ownerserve.gateway.tracing.trace import (
    BegunRequest,
    FollowedTrace,
    LegTrace,
    TurnStep,
    TurnTrace,
    is_failure,
)
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.router.messages import Dispatch, Refuse
from ownerserve.router.requests.body import BodyFields, Usage
from ownerserve.router.worker import Receipt

EXPORT_TIMEOUT_S = 5.0
_OPERATIONS = {
    b"/v1/chat/completions": "chat",
    b"/v1/messages": "chat",
    b"/v1/responses": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
}
_WELL = ("finished",)


class OtelTracer:
    """The OTel tracer records the turns that its sampler takes: by their parent where they bring
    one, else this share of them."""

    def __init__(
        self, endpoint: str, *, share: float, patience_s: float = EXPORT_TIMEOUT_S
    ) -> None:
        path = "" if endpoint.partition("://")[2].partition("/")[2] else "/v1/traces"
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=patience_s)
        # Else every failed try is in the log, with a trace: what matters is told once, below.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        about = {
            "service.name": "ownerserve-gateway",
            "service.version": __version__,
            "host.name": socket.gethostname(),
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create(about),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Told(exporter)))
        self._tracer = self._provider.get_tracer("ownerserve.gateway", __version__)

    def begin(self, head: BegunRequest) -> TurnTrace:
        """Begin the span of a request, below its client's."""
        came = read_trace(head.special)
        above = INVALID_SPAN
        if came is not None and came.parent_id:
            above = NonRecordingSpan(_context_of(came))
        path = head.target.partition(b"?")[0][:PATH_MAX_BYTES]
        operation = _OPERATIONS.get(path, path.decode("latin-1"))
        span = self._tracer.start_span(
            operation, context=set_span_in_context(above), kind=SpanKind.SERVER
        )
        state = b"" if came is None else came.state
        if not span.is_recording():
            told = _told_of(span, state)
            return FollowedTrace(told, told.parent_id)
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "ownerserve",
                "http.request.method": head.method.decode("latin-1"),
                "url.path": path.decode("latin-1"),
            }
        )
        return RecordedTrace(self._begin_below, span, operation=operation, state=state)

    def close(self) -> None:
        """Send what is recorded, for some seconds at most."""
        self._provider.shutdown()

    def _begin_below(self, name: str, above: Span, kind: SpanKind) -> Span:
        return self._tracer.start_span(name, context=set_span_in_context(above), kind=kind)


class _Steps:
    """The steps below a span: at most one of them runs."""

    __slots__ = ("_above", "_begin", "_running")

    def __init__(self, begin: Callable[[str, Span, SpanKind], Span], above: Span) -> None:
        self._begin = begin
        self._above = above
        self._running: Span | None = None

    def go_on(self, step: TurnStep | None) -> None:
        """End the running step and begin another; None: there is none."""
        if self._running is not None:
            self._running.end()
        self._running = (
            None if step is None else self._begin(step.value, self._above, SpanKind.INTERNAL)
        )


class RecordedLeg:
    """A recorded leg is the span of one dispatch, with its steps below."""

    __slots__ = ("_span", "_state", "_steps")

    def __init__(
        self, begin: Callable[[str, Span, SpanKind], Span], above: Span, state: bytes
    ) -> None:
        self._span = begin("turn at worker", above, SpanKind.CLIENT)
        self._steps = _Steps(begin, self._span)
        self._state = state

    def sent(self, dispatch: Dispatch) -> None:
        """Note what was decided."""
        decision = dispatch.decision
        host, _, port = dispatch.worker.rpartition(":")
        self._span.set_attributes(
            {
                "server.address": host or dispatch.worker,
                **({"server.port": int(port)} if port.isdigit() else {}),
                "ownerserve.worker": dispatch.worker,
                "ownerserve.reason": dispatch.reason.value,
                "ownerserve.action": decision.action.value,
                "ownerserve.turn": dispatch.turn.value,
                "ownerserve.attempt": dispatch.attempt,
                "ownerserve.expected_cached_tokens": decision.cached_tokens,
                "ownerserve.prefill_tokens": dispatch.prefill_tokens,
            }
        )

    def lines(self) -> bytes:
        """Return the lines by which the worker's spans stand below this one."""
        told = _told_of(self._span, self._state)
        return told.lines(told.parent_id)

    def step(self, step: TurnStep) -> None:
        """End the present step, and begin another."""
        self._steps.go_on(step)

    def answered(self, status: int) -> None:
        """Note the status; the answer is relayed from here on."""
        self._span.set_attribute("http.response.status_code", status)
        if is_failure(status):
            self._span.set_status(Status(StatusCode.ERROR))
            self._span.set_attribute("error.type", str(status))
        self._steps.go_on(TurnStep.RELAY)

    def over(self, why: str) -> None:
        """End the leg; `why` it came to nothing, empty where it did not."""
        self._steps.go_on(None)
        if why:
            self._span.set_status(Status(StatusCode.ERROR, why))
            self._span.set_attribute("error.type", why)
        self._span.end()


class RecordedTrace:
    """A recorded trace is the span of one turn, with its steps and legs below. Whatever ends the
    turn ends all that runs."""

    __slots__ = ("_begin", "_legs", "_operation", "_span", "_state", "_steps")

    def __init__(
        self,
        begin: Callable[[str, Span, SpanKind], Span],
        span: Span,
        *,
        operation: str,
        state: bytes,
    ) -> None:
        self._begin = begin
        self._span = span
        self._operation = operation
        self._state = state
        self._steps = _Steps(begin, span)
        self._legs: dict[Receipt, RecordedLeg] = {}

    @property
    def trace_id(self) -> str:
        """The client's trace, or the one that begins here."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def asked(self, fields: BodyFields) -> None:
        """Name the span by the model, as the conventions have it, where the body names one; the
        turn waits from now on."""
        self._steps.go_on(TurnStep.QUEUE)
        try:
            model = fields.text("model")
        except InvalidInput:  # whoever needs the model says so
            return
        self._span.set_attribute("gen_ai.request.stream", fields.raw("stream") == b"true")
        if model:
            self._span.set_attribute("gen_ai.request.model", model)
            self._span.update_name(f"{self._operation} {model}")

    def deciding(self, lost: Dispatch | None, why: str) -> None:
        """End a leg that came to nothing, and begin to decide."""
        leg = None if lost is None else self._legs.pop(lost.receipt, None)
        if leg is not None:
            leg.over(why)
        self._steps.go_on(TurnStep.DECIDE)

    def decided(
        self, request_id: bytes, session: SessionId | None, outcome: Dispatch | Refuse
    ) -> None:
        """Note the decision, on the turn's span: of several the last one."""
        self._steps.go_on(None)
        said = {"ownerserve.request_id": request_id.decode("latin-1")}
        if session is not None:
            said["gen_ai.conversation.id"] = session
        if isinstance(outcome, Dispatch):
            said |= {
                "ownerserve.worker": outcome.worker,
                "ownerserve.reason": outcome.reason.value,
                "ownerserve.action": outcome.decision.action.value,
            }
            self._span.set_attribute(
                "ownerserve.expected_cached_tokens", outcome.decision.cached_tokens
            )
        else:
            said["ownerserve.reason"] = outcome.refusal.value
        self._span.set_attributes(said)

    def leg(self, dispatch: Dispatch) -> LegTrace:
        """Begin the span of a dispatch."""
        leg = self._legs.get(dispatch.receipt)
        if leg is None:
            leg = self._legs[dispatch.receipt] = RecordedLeg(self._begin, self._span, self._state)
            leg.sent(dispatch)
        return leg

    def refused(self, request_id: bytes, rejected: Rejected) -> None:
        """End the span of a request that is told no before anything was decided; of whatever path,
        it has one of few names."""
        if self._operation not in _OPERATIONS.values():
            self._span.update_name("refused")
        self._span.set_attributes(
            {
                "ownerserve.request_id": request_id.decode("latin-1"),
                "ownerserve.reason": rejected.code,
                "http.response.status_code": rejected.status.value,
            }
        )
        self.ended("refused")

    def ended(self, end: str, usage: Usage | None = None) -> None:
        """End the turn and all that runs of it."""
        span, is_well = self._span, end in _WELL
        if not span.is_recording():
            return
        for leg in self._legs.values():
            leg.over("" if is_well else end)
        self._legs.clear()
        self._steps.go_on(None)
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
            if usage.tells_cached:
                computed = usage.prompt_tokens - usage.cached_tokens
                span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
                span.set_attribute("ownerserve.computed_tokens", computed)
        span.set_attribute("ownerserve.end", end)
        if not is_well:
            span.set_status(Status(StatusCode.ERROR, end))
            span.set_attribute("error.type", end)
        span.end()


def _context_of(came: TraceContext) -> SpanContext:
    return SpanContext(
        int(came.trace_id, 16),
        int(came.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(came.flags),
    )


def _told_of(span: Span, state: bytes) -> TraceContext:
    """Return what is passed on of a span; `state` as it came from above."""
    context = span.get_span_context()
    return TraceContext(
        f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags), state
    )


class _Told(SpanExporter):
    """This exporter tells, once each, when the collector takes no spans and when it takes them
    again; how many were lost meanwhile."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, in the SDK's thread."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                tell(logging.WARNING, "traces_lost", cause="the collector takes no spans")
            self._lost += len(spans)
        elif self._lost:
            tell(logging.INFO, "traces_sent_again", spans_lost=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Have nothing of its own to send."""
        return self._exporter.force_flush(timeout_millis)
