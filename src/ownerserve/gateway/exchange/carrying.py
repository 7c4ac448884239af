"""The phase of a stream that is carried on: when its worker dies in its middle, another one is sent
the same request, and its stream is joined to what the client has.

    CarriedStream ── broken ──> Deciding ─ CarryOn ─> Connecting ──> AwaitingHead ──> CarriedStream
       (first leg)     │                      │            (the client has a part: PartSaid)  │
                       └ not to be continued  Refuse                            not the same ─┤
                         v                    v                                               v
                       the error event, as for any stream that stops          that, or the next leg

Only for requests whose answer is the same wherever it is computed: greedy, or with a seed. Nothing
of that is believed: the second worker's stream is told from its beginning and compared with what
the client has, to the character (told.py); where it differs, the client hears the error event
instead. So the client sees no gap and nothing twice, and one id.

The client gets whole events, framed anew: an event that is cut off in its middle was never sent.
The request's body is kept until the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.phases import OVER
from ownerserve.gateway.exchange.relaying import HELD_MAX_BYTES, LAST_CHUNK, Relaying
from ownerserve.gateway.exchange.told import Joining, NotTheSame, Told
from ownerserve.gateway.exchange.usage import is_usage_event
from ownerserve.gateway.http.events import chunk, error_event, split_events
from ownerserve.gateway.http.heads import RequestHead, ResponseHead
from ownerserve.gateway.http.replies import STOPPED, CutShort, Rejected, cut_short, fault
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.turns import BegunAnswer, LostStream
from ownerserve.router.messages import Broken, Failure
from ownerserve.router.requests.body import BodyFields

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange

_PATHS = (b"/v1/chat/completions", b"/v1/completions")


def is_repeatable(fields: BodyFields) -> bool:
    """Return whether a request's answer is the same wherever it is computed, by what it says: it is
    greedy, or has a seed."""
    seed, temperature = fields.raw("seed"), fields.raw("temperature")
    if seed is not None and seed != b"null":
        return True
    try:
        return temperature is not None and float(temperature) == 0.0
    except ValueError:
        return False


def is_chat(head: RequestHead) -> bool:
    """Return whether a request is one for chat or completions."""
    return head.method == b"POST" and head.target.partition(b"?")[0] in _PATHS


def may_be_carried_on(attempt: Attempt, head: ResponseHead) -> bool:
    """Return whether the answer that begins with `head` can be carried on by another worker."""
    exchange = attempt.exchange
    return (
        exchange.legs.carries_on
        and head.has_events
        and head.chunked
        and is_chat(exchange.request.head)
        and is_repeatable(attempt.asked.fields)
    )


class LegOfStream(Protocol):
    """A leg of a stream says what of a worker's events the client gets."""

    told: Told
    why: CutShort
    """What the client hears where the worker's events are not the ones that it has a part of."""

    def take(self, event: bytes) -> bytes:
        """Return what the client gets for an event. Raises NotTheSame."""
        ...

    def end(self) -> None:
        """Hear that the worker has sent all. Raises NotTheSame where that is too little."""
        ...


class FirstOfStream:
    """The first leg of a stream is passed on as it comes."""

    __slots__ = ("told", "why")

    def __init__(self, told: Told | None = None) -> None:
        self.told = Told() if told is None else told
        self.why = cut_short(Failure.CLOSED)

    def take(self, event: bytes) -> bytes:
        """Return the event, which the client has from now on."""
        self.told.hear(event)
        return event

    def end(self) -> None:
        """Hear that it is whole."""


class NextOfStream:
    """A further leg of a stream is joined to what the client has."""

    __slots__ = ("_joining", "told", "why")

    def __init__(self, told: Told, why: CutShort) -> None:
        self.told = told
        self.why = why
        self._joining = Joining(told)

    def take(self, event: bytes) -> bytes:
        """Return what the client does not have of the event. Raises NotTheSame."""
        more = self._joining.take(event)
        if more:
            self.told.hear(more)
        return more

    def end(self) -> None:
        """Hear that the other worker has sent all. Raises NotTheSame where the client has more."""
        self._joining.end()


class CarriedStream(Relaying):
    """In this phase events go to the client, as they come and whole; when they stop, another worker
    carries on."""

    __slots__ = ("_is_quiet", "_is_torn", "_leg", "_pending")

    def __init__(
        self, attempt: Attempt, upstream: UpstreamConnection, begun: BegunAnswer, leg: LegOfStream
    ) -> None:
        super().__init__(attempt, upstream, begun, None)
        self._is_quiet = attempt.exchange.asks_usage
        """Whether the usage was asked for by the gateway alone, and is kept back."""
        self._leg = leg
        self._pending = b""
        """An event that is not whole."""
        self._is_torn = False
        """Whether the client has a part of an event."""

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now: the events that are whole. Raises NotTheSame."""
        events, pending = split_events(self._pending + self.upstream.reader.payload.now)
        self._pending = pending
        if self._is_quiet:
            events = [event for event in events if not is_usage_event(event)]
        pieces = [self.taken(event) for event in events]
        if len(pending) > HELD_MAX_BYTES:
            self._is_torn, self._pending = True, b""
            pieces.append(pending)
        return self._framed(b"".join(pieces))

    def taken(self, event: bytes) -> bytes:
        """Return what the client gets for an event. Raises NotTheSame."""
        return self._leg.take(event)

    def left_off(self) -> tuple[Told, bytes] | None:
        """Return what its client was told, and what has come of an event that it does not have,
        where another phase is to go on with the answer; None: that can't be said."""
        if self._is_torn or not isinstance(self._leg, FirstOfStream):
            return None
        return self._leg.told, self._pending

    def answer_bytes(self, data: bytes) -> None:
        """Pass on the events that are whole now."""
        try:
            piece = self.passed(data)
        except NotTheSame:
            self.differs()
            return
        if piece:
            self._client.write(piece)

    def answer_end(self, tail: bytes) -> None:
        """Close the books of an answer that is whole."""
        try:
            self._leg.end()
        except NotTheSame:
            self.differs()
            return
        if isinstance(self._leg, NextOfStream):
            self.attempt.exchange.legs.carried("done")
        last = LAST_CHUNK if self._is_chunked else b""
        self._client.write(self._framed(self._pending) + last)
        super().answer_end(tail)

    def answer_broken(self, failure: Failure) -> None:
        """Have another worker carry on, as the stream stops in its middle."""
        told, exchange = self._leg.told, self.attempt.exchange
        if told.is_over or self._is_torn or not told.can_be_continued:
            if not told.is_over:
                exchange.legs.carried("unfit")
            super().answer_broken(failure)
            return
        exchange.begun = PartSaid(told, cut_short(failure), self.begun)
        exchange.carry_on(self.attempt, LostStream(self.attempt.dispatch, failure))

    def differs(self) -> None:
        """Tell the client that its stream stops: the other worker's is not the same."""
        attempt = self.attempt
        self.upstream.abort()
        attempt.exchange.phase = OVER
        attempt.exchange.legs.carried("differs")
        attempt.exchange.turns.ended(attempt.asked, Broken(attempt.dispatch.receipt))
        self.cut_short(self._leg.why)

    def abort(self) -> None:
        """Hang up on the worker; a client that has read the last event has its answer, and many
        wait for no body's end."""
        if not self._leg.told.is_over:
            super().abort()
            return
        self.upstream.abort()
        self.finished(self.upstream.reader.payload.tail)

    def cut_short(self, why: CutShort) -> None:
        """Tell the client in its stream why it stops, and close."""
        exchange = self.attempt.exchange
        if self._is_torn or self._leg.told.is_over:
            exchange.client.answer_cut_off()
        else:
            exchange.client.answer_cut_off(last_words(exchange, why))

    @property
    def _is_chunked(self) -> bool:
        return self.attempt.exchange.request.head.version != b"1.0"

    def _framed(self, payload: bytes) -> bytes:
        """Return payload as the client gets it: some are too old for chunks."""
        return chunk(payload) if self._is_chunked else payload


def last_words(exchange: Exchange, why: CutShort) -> bytes:
    """Return the event that ends a stream of whole events with an error, as the client gets it."""
    head = exchange.request.head
    event = error_event(head.target, b"", code=why.code, message=why.message)
    return event if head.version == b"1.0" else chunk(event)


class PartSaid:
    """The client has a part of a stream, whose worker is lost for the reason `why`."""

    __slots__ = ("_why", "begun", "told")

    def __init__(self, told: Told, why: CutShort, begun: BegunAnswer) -> None:
        self.told = told
        self._why = why
        self.begun = begun

    @property
    def can_be_told_anew(self) -> bool:
        """Whether a worker that begins the answer anew may be asked for the rest."""
        return True

    def reject(self, exchange: Exchange, told: Rejected) -> None:
        """Tell the client that its stream stops, as nobody carries on."""
        exchange.legs.carried("nobody")
        exchange.client.answer_cut_off(last_words(exchange, self._why))

    def fault(self, exchange: Exchange) -> None:
        """Tell the client that a fault of the gateway's own ends its stream."""
        told = fault()
        exchange.client.answer_cut_off(last_words(exchange, CutShort(told.code, told.message)))

    def stop(self, exchange: Exchange) -> None:
        """Tell the client that the gateway ends."""
        exchange.client.answer_cut_off(last_words(exchange, STOPPED))

    def begin(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        came: BegunAnswer,
        *,
        head: ResponseHead,
        first: bytes,
    ) -> BodySink:
        """Join the other worker's stream to what the client has; what is no stream is no answer."""
        exchange = attempt.exchange
        begun = structs.replace(came, first_byte_s=self.begun.first_byte_s)
        stream = CarriedStream(attempt, upstream, begun, NextOfStream(self.told, self._why))
        if not (head.has_events and head.chunked):
            upstream.abort()
            exchange.decide_again(attempt, Failure.MALFORMED)
            return stream
        exchange.phase = stream
        exchange.legs.carried("begun")
        stream.answer_bytes(first)
        if exchange.phase is stream and not exchange.client.takes_more:
            stream.pause()
        return stream
