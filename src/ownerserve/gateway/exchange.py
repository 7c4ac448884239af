"""An exchange is one request's life in the gateway, from its arrival to its answer's end, as
phases.

An exchange is in one phase at a time, and a phase has only what exists in it. A dispatch's receipt
is given back exactly once: by whichever phase holds it when it ends.

    Reading ──> Queued ──> Deciding ─ Dispatch ─> Connecting ──> AwaitingHead ──> Relaying ─> over
    (whose      (a first      │  ^                    │ │            │   │            │
     is it?)     turn)      Refuse └──── failed ──────┘ │            │   └ a refusal ─> Discarding
                              v    └──── refused ───────┴────────────┘        its end ─┘ (Deciding)
                            over

A client that hangs up ends any phase. A worker's refusal is read to its end and not passed on: the
next candidate is asked. Only when no other is left, or the retry budget is used up, the client
hears it, as 429. What is decided, counted and said of a turn is Turns' (turns.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from msgspec import structs

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.http.callers import Caller
from ownerserve.gateway.http.client import ClientConnection, HttpRequest
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.events import chunk, error_event, unframed, whole_events
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import (
    STOPPED,
    CutShort,
    Rejected,
    cut_short,
    fault,
    pressed,
    refused,
    too_late,
)
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.stamps import TurnRefused
from ownerserve.gateway.turns import (
    Arrived,
    BegunAnswer,
    Correction,
    LookUp,
    LostDispatch,
    NotLetIn,
    Route,
    Why,
)
from ownerserve.gateway.workers.rpc import HeldPlace, Manner, is_direct_append, is_turn
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.units import MIB
from ownerserve.kv.wire.headers import session_id_of
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject
from ownerserve.router.admission import Go, Ticket
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Aborted, Broken, Dispatch, Failure, Refuse
from ownerserve.router.requests.body import TAIL_BYTES, scan_response_id

log = logging.getLogger("ownerserve.gateway")


NOT_REFUSED = TurnRefused(WorkerRefusal.OTHER, 0, 0)


class TurnPort(Protocol):
    """A turn port is all that an exchange asks of the gateway, a call for each step of a turn
    (turns.Turns)."""

    def read(self, request: HttpRequest) -> Arrived:
        """Read who asks, and for what. Raises Rejected."""
        ...

    def enter(self, asked: IdentifiedRequest, go: Go) -> Ticket | None:
        """Call `go` at once and return None, or queue it for a seat and return the ticket."""
        ...

    def decide(
        self, asked: IdentifiedRequest, lost: LostDispatch | None = None, *, request_id: bytes
    ) -> Route | Refuse:
        """Decide where the turn runs, for the first time or after a dispatch that was lost."""
        ...

    def patience_s(self, asked: IdentifiedRequest) -> float:
        """Return how long a worker that is up may send nothing of the answer, in seconds."""
        ...

    def began(
        self, dispatch: Dispatch, head: ResponseHead, *, started_s: float
    ) -> BegunAnswer | TurnRefused:
        """Take in an answer's head: return the worker's word on it, or its no to the turn."""
        ...

    def receipt(self, dispatch: Dispatch, head: ResponseHead, caller: Caller) -> bytes:
        """Return the header lines that tell the client of the decision."""
        ...

    def finished(
        self,
        asked: IdentifiedRequest,
        dispatch: Dispatch,
        begun: BegunAnswer,
        tail: bytes,
        *,
        alias: SessionId | None,
        started_s: float,
    ) -> None:
        """Close the books of a turn whose answer is whole; `tail` are its last bytes."""
        ...

    def ended(
        self, asked: IdentifiedRequest, event: NotLetIn | Aborted | Broken | None = None
    ) -> None:
        """End a turn without a whole answer."""
        ...


class Exchange:
    """An exchange is one request and its phase. `turns` decides and counts; `client` gets the
    answer."""

    __slots__ = ("client", "phase", "refused", "request", "request_id", "started_s", "turns")

    def __init__(
        self, turns: TurnPort, client: ClientConnection, request: HttpRequest, request_id: bytes
    ) -> None:
        self.turns = turns
        self.client = client
        self.request = request
        self.request_id = request_id
        self.started_s = 0.0
        self.refused = NOT_REFUSED
        """What the workers' refusals come to so far."""
        self.phase: Phase = OVER

    def start(self) -> None:
        """Read the request, decide and send it; answer the client itself when there is nothing to
        send."""
        try:
            arrived = self.turns.read(self.request)
        except Rejected as rejected:
            self.client.answer_rejected(rejected, self.request_id)
            return
        except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
            self.log_fault(error)
            self.client.answer_rejected(fault(), self.request_id)
            return
        asked, self.started_s = arrived.asked, arrived.at_s
        if arrived.look_up is None:
            try:
                self.enter(asked)
            except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
                self.failed(error)
        else:
            self.phase = Reading(self, asked, self._run(self._find(asked, arrived.look_up)))

    def abort(self) -> None:
        """End the exchange, as the client hung up: the worker's connection is closed, so that the
        engine can stop."""
        phase, self.phase = self.phase, OVER
        phase.abort()

    def stop(self) -> None:
        """End the exchange, as the gateway ends, with a word to the client where it can be said."""
        phase, self.phase = self.phase, OVER
        phase.abort()
        if isinstance(phase, Relaying):
            phase.cut_short(STOPPED)

    def pause(self) -> None:
        """Stop reading the answer: the client reads too slowly."""
        self.phase.pause()

    def resume(self) -> None:
        """Go on reading the answer: the client reads again."""
        self.phase.resume()

    # What phases do

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work of the present phase as a task; a fault in it is logged and ends the
        request."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def enter(self, asked: IdentifiedRequest) -> None:
        """Decide at once, or queue the turn: a new session may have to wait until the fleet has
        room for it."""
        self.phase = Queued(self, asked, None)
        ticket = self.turns.enter(asked, lambda now: self._decide(asked))
        if ticket is not None:
            self.phase = Queued(self, asked, ticket)

    def follow(self, asked: IdentifiedRequest, manner: Manner, route: Route | Refuse) -> None:
        """Send the turn where it was decided, or tell the client no."""
        if isinstance(route, Refuse):
            self._refuse(asked, refused(route.refusal))
            return
        if route.dispatch.reason is DispatchReason.RETRY_UNASKED:
            manner = Manner.UNASKED
        attempt = Attempt(self, asked, route, manner)
        if attempt.asks and not is_direct_append(route.dispatch):
            self.phase = Connecting(attempt, None, self._run(self._reserve(attempt)))
        else:
            self.connect(attempt, None)

    def decide_again(self, attempt: Attempt, why: Why) -> None:
        """Ask for another worker, or tell the client no, as nothing of an answer came, for the
        reason `why`."""
        asked = attempt.asked
        self.phase = Deciding(self, asked)
        lost = LostDispatch(attempt.dispatch, why)
        route = self.turns.decide(asked, lost, request_id=self.request_id)
        if isinstance(route, Refuse) and isinstance(why, WorkerRefusal):
            pressure = self.refused
            told = pressed(why.value, pressure.status, pressure.retry_after_s)
            self._refuse(asked, told)
        elif isinstance(route, Refuse) and why is Failure.LATE:
            self._refuse(asked, too_late())
        else:
            self.follow(asked, attempt.manner, route)

    def let_body_go(self) -> None:
        """Keep the request's body no longer: an answer has begun, nobody else will be asked."""
        self.request.held.let_go()
        self.request = structs.replace(self.request, body=b"")

    def connect(self, attempt: Attempt, place: HeldPlace | None) -> None:
        """Send the turn on a kept connection, or on a new one."""
        is_anew = attempt.dispatch.reason is DispatchReason.RETRY_NEW_CONNECTION
        kept = None if is_anew else attempt.route.pool.take()
        if kept is not None:
            self._send(attempt, place, kept)
        else:
            self.phase = Connecting(attempt, place, self._run(self._open(attempt, place)))

    def failed(self, error: BaseException) -> None:
        """End the request after a fault, not in silence: with an answer where none has begun."""
        self.log_fault(error)
        phase, self.phase = self.phase, OVER
        try:
            phase.abort()
        except Exception as second:  # noqa: BLE001 - the fault may be in what ends a phase
            self.log_fault(second)
        if isinstance(phase, Relaying):
            told = fault()
            phase.cut_short(CutShort(told.code, told.message))
        elif phase is OVER:  # nobody can say how much of an answer is written
            self.client.answer_cut_off()
        else:
            self.client.answer_rejected(fault(), self.request_id)

    def log_fault(self, error: BaseException) -> None:
        """Log a fault of the gateway's own under the request's id."""
        log.error("request %s: a fault of the gateway's", self.request_id.decode(), exc_info=error)

    # The steps

    async def _find(self, asked: IdentifiedRequest, look_up: LookUp) -> None:
        """Ask the directory for the owner of a session that is new here, then go on."""
        await look_up()
        self.enter(asked)

    def _decide(self, asked: IdentifiedRequest) -> None:
        """Decide where the turn runs, and send it there. For a turn that waited this is called in
        the midst of another request's end: a fault ends this request and no other."""
        self.phase = Deciding(self, asked)
        try:
            self.follow(asked, Manner.ASKING, self.turns.decide(asked, request_id=self.request_id))
        except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
            self.failed(error)

    def _refuse(self, asked: IdentifiedRequest, told: Rejected) -> None:
        self.turns.ended(asked)
        self.phase = OVER
        self.client.answer_rejected(told, self.request_id)

    async def _reserve(self, attempt: Attempt) -> None:
        """Ask the worker for a place before the turn is sent; a refusal leads to another decision,
        and so does a worker's word that the decision was wrong in."""
        came = await attempt.route.reserve(self.request_id)
        if isinstance(came, Reject):
            self.decide_again(attempt, came.reason)
        elif isinstance(came, Correction):
            self.decide_again(attempt, came)
        else:
            self.connect(attempt, came)

    async def _open(self, attempt: Attempt, place: HeldPlace | None) -> None:
        try:
            upstream = await attempt.route.pool.connect()
        except OSError as error:
            give_back(place)
            self.decide_again(attempt, Failure.OURS if is_ours(error) else Failure.CONNECT)
            return
        self._send(attempt, place, upstream)

    def _send(
        self, attempt: Attempt, place: HeldPlace | None, upstream: UpstreamConnection
    ) -> None:
        asked, route = attempt.asked, attempt.route
        head, body = self.request.head, self.request.body
        line = route.line(asked)
        if place is not None:
            line = structs.replace(line, reservation=place.number)
        elif attempt.is_judged and is_direct_append(route.dispatch):
            line = structs.replace(line, judged=True)
        body = asked.body_for(body, None if line.name is None else session_id_of(line))
        sent = head.to_worker(self.request_id, len(body), orders=route.head_lines(line))
        self.phase = awaiting = AwaitingHead(attempt, place, upstream)
        patience_s = self.turns.patience_s(asked)
        upstream.send(sent, body, method=head.method, sink=awaiting, patience_s=patience_s)
        if place is not None and self.phase is awaiting:
            place.use()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the request when one of its tasks ends badly: this is the root of all of them."""
        if task.cancelled() and not self.phase.is_waiting_for(task):
            return  # by `abort`
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.failed(error)


class Attempt(msgspec.Struct, frozen=True, eq=False):
    """An attempt is one dispatch of an exchange's request, whose receipt is not given back."""

    exchange: Exchange
    asked: IdentifiedRequest
    route: Route
    manner: Manner

    @property
    def dispatch(self) -> Dispatch:
        """Return what was decided."""
        return self.route.dispatch

    @property
    def asks(self) -> bool:
        """Whether the worker's admission can be asked of this, and is by us."""
        return (
            self.manner is Manner.ASKING
            and self.route.can_ask
            and is_turn(self.exchange.request.head)
        )

    @property
    def is_judged(self) -> bool:
        """Whether the worker's admission has a word in this, also as it arrives."""
        return self.asks and self.route.gives_places

    def without_body(self) -> Attempt:
        """Return the attempt as it goes on once its body is let go."""
        return structs.replace(self, asked=self.asked.without_body())

    def abort(self) -> None:
        """Give the receipt back, as the client hung up."""
        self.exchange.turns.ended(self.asked, Aborted(self.dispatch.receipt))

    def close_books(self) -> None:
        """Give back what a fault, wherever it came, may have left: the receipt, and the turn's part
        in its session."""
        try:
            self.abort()
        except InvariantViolated:  # the receipt was given back before the fault
            self.exchange.turns.ended(self.asked)


class Phase:
    """A phase is where an exchange stands."""

    __slots__ = ()

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether that task's end is what comes next."""
        return False

    def abort(self) -> None:
        """End the phase and give back what it holds: the client is gone, or a fault ends the
        request."""

    def pause(self) -> None:
        """Stop reading the answer: the client reads too slowly."""

    def resume(self) -> None:
        """Go on reading the answer: the client reads again."""


OVER = Phase()
"""Nothing of the turn runs: not begun, answered, refused or aborted."""


class Reading(Phase):
    """In this phase it is known who asks, and the directory is asked who owns the session."""

    __slots__ = ("asked", "exchange", "task")

    def __init__(
        self, exchange: Exchange, asked: IdentifiedRequest, task: asyncio.Task[None]
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self.task = task

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is the one that asks the directory."""
        return task is self.task

    def abort(self) -> None:
        """Stop asking the directory; the turn was not let in."""
        self.task.cancel()
        self.exchange.turns.ended(self.asked, NotLetIn())


class Queued(Phase):
    """In this phase a new session's first turn waits for a seat, or it is being asked for one (no
    ticket)."""

    __slots__ = ("asked", "exchange", "ticket")

    def __init__(self, exchange: Exchange, asked: IdentifiedRequest, ticket: Ticket | None) -> None:
        self.exchange = exchange
        self.asked = asked
        self.ticket = ticket

    def abort(self) -> None:
        """Leave the queue; the turn was not let in."""
        self.exchange.turns.ended(self.asked, NotLetIn(self.ticket))


class Deciding(Phase):
    """In this phase the session is inside and no dispatch of the turn is live: one is being
    decided."""

    __slots__ = ("asked", "exchange")

    def __init__(self, exchange: Exchange, asked: IdentifiedRequest) -> None:
        self.exchange = exchange
        self.asked = asked

    def abort(self) -> None:
        """End a turn of which no dispatch is live."""
        self.exchange.turns.ended(self.asked)


class Connecting(Phase):
    """In this phase a worker is chosen: it is asked for a place, or a connection to it is made."""

    __slots__ = ("attempt", "place", "task")

    def __init__(self, attempt: Attempt, place: HeldPlace | None, task: asyncio.Task[None]) -> None:
        self.attempt = attempt
        self.place = place
        self.task = task

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is the one that asks for a place or connects."""
        return task is self.task

    def abort(self) -> None:
        """Stop connecting and give place and receipt back."""
        self.task.cancel()
        give_back(self.place)
        self.attempt.abort()


class Sent(Phase):
    """In this phase the turn is at a worker, over `upstream`."""

    __slots__ = ("attempt", "upstream")

    def __init__(self, attempt: Attempt, upstream: UpstreamConnection) -> None:
        self.attempt = attempt
        self.upstream = upstream

    def abort(self) -> None:
        """Hang up on the worker and give the receipt back."""
        self.upstream.abort()
        self.attempt.abort()

    def pause(self) -> None:
        """Stop reading the worker's answer."""
        self.upstream.pause()

    def resume(self) -> None:
        """Go on reading the worker's answer."""
        self.upstream.resume()

    def answer_fault(self, error: Exception) -> None:
        """End the request, as the gateway failed at what the worker sent."""
        self.attempt.exchange.failed(error)


class AwaitingHead(Sent):
    """In this phase the turn is sent and nothing of an answer has come (upstream.HeadSink)."""

    __slots__ = ("place",)

    def __init__(
        self, attempt: Attempt, place: HeldPlace | None, upstream: UpstreamConnection
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.place = place

    def abort(self) -> None:
        """Hang up on the worker and give place and receipt back."""
        self.upstream.abort()
        give_back(self.place)
        self.attempt.abort()

    def answer_begin(self, head: ResponseHead, first: bytes) -> BodySink:
        """Take in the answer's head: the body is relayed, or read to its end where it is a
        refusal."""
        attempt = self.attempt
        exchange = attempt.exchange
        if head.status >= HTTPStatus.BAD_REQUEST:  # it may be so before the place was looked at
            give_back(self.place)
        came = exchange.turns.began(attempt.dispatch, head, started_s=exchange.started_s)
        if isinstance(came, TurnRefused):
            longest_s = max(came.retry_after_s, exchange.refused.retry_after_s)
            exchange.refused = structs.replace(came, retry_after_s=longest_s)
            exchange.phase = ending = Discarding(attempt, self.upstream, came.why)
            return ending
        relaying: type[Relaying] = Streaming if head.has_events and head.chunked else Relaying
        if head.chunked and exchange.request.head.version == b"1.0":
            relaying = StreamingDechunked if head.has_events else Dechunking
            head = head.unchunked()
        response_id = None
        if exchange.request.head.target.startswith(b"/v1/responses"):
            response_id = scan_response_id(self.upstream.reader.payload[:TAIL_BYTES])
        exchange.phase = going_on = relaying(attempt, self.upstream, came, response_id)
        client = exchange.client
        if head.ends_by_close:
            client.close_after_answer()
        lines = b"%bx-request-id: %b\r\n%b" % (
            exchange.turns.receipt(attempt.dispatch, head, exchange.request.head.caller),
            exchange.request_id,
            client.connection_line,
        )
        client.write(head.to_client(lines) + going_on.passed(first))
        exchange.let_body_go()
        going_on.attempt = attempt.without_body()
        return going_on

    def answer_failed(self, failure: Failure) -> None:
        """Give the place back and decide again, as nothing of an answer came."""
        give_back(self.place)
        self.attempt.exchange.decide_again(self.attempt, failure)


class Relaying(Sent):
    """In this phase the answer goes to the client as it comes (upstream.BodySink)."""

    __slots__ = ("begun", "response_id")

    def __init__(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        begun: BegunAnswer,
        response_id: str | None,
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.begun = begun
        self.response_id = response_id

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now, as a part of the body has come."""
        return data

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client."""
        self.attempt.exchange.client.write(data)

    def answer_end(self, tail: bytes) -> None:
        """Close the books of an answer that is whole; `tail` are its last bytes."""
        attempt = self.attempt
        exchange, asked = attempt.exchange, attempt.asked
        exchange.phase = OVER
        alias = asked.alias(self.response_id) if self.response_id else None
        try:
            exchange.turns.finished(
                asked, attempt.dispatch, self.begun, tail, alias=alias, started_s=exchange.started_s
            )
        except Exception as error:  # noqa: BLE001 - the answer is whole: only our books are not
            exchange.log_fault(error)
            attempt.close_books()
        exchange.client.answer_complete()

    def answer_broken(self, failure: Failure) -> None:
        """Cut the client off, as the answer stops in its middle."""
        attempt = self.attempt
        attempt.exchange.phase = OVER
        attempt.exchange.turns.ended(attempt.asked, Broken(attempt.dispatch.receipt))
        self.cut_short(cut_short(failure))

    def cut_short(self, why: CutShort) -> None:
        """Cut the client off in the middle of its answer: nothing can be said in it."""
        self.attempt.exchange.client.answer_cut_off()


HELD_MAX_BYTES = MIB
"""A line that is longer is passed on in parts; a stream that stops then is cut off."""


class Streaming(Relaying):
    """In this phase events go to the client, as they come and in whole lines: so that an event of
    the gateway's own can tell the client why its stream stops in its middle."""

    __slots__ = ("_held", "_is_torn")

    def __init__(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        begun: BegunAnswer,
        response_id: str | None,
    ) -> None:
        super().__init__(attempt, upstream, begun, response_id)
        self._held = b""
        """Chunks from a frame's begin, of which the last is not whole or ends amid a line."""
        self._is_torn = False
        """Whether the client has a part of a line, or of a frame, of which the rest was not
        sent."""

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now: all that has come, unless that ends amid a line."""
        piece = self._piece(data)
        if self._held:
            piece, self._held = self._held + piece, b""
        if self._is_whole(piece):
            self._is_torn = False
        elif len(piece) <= HELD_MAX_BYTES and not self._is_torn:
            self._held, piece = piece, b""
        else:
            self._is_torn = True
        return piece

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client, in whole lines."""
        piece = self.passed(data)
        if piece:
            self.attempt.exchange.client.write(piece)

    def answer_end(self, tail: bytes) -> None:
        """Pass on what is held, and close the books of an answer that is whole."""
        if self._held:
            self.attempt.exchange.client.write(self._held)
        super().answer_end(tail)

    def cut_short(self, why: CutShort) -> None:
        """Tell the client in its stream why it stops, and close."""
        exchange = self.attempt.exchange
        if self._is_torn:
            exchange.client.answer_cut_off()
            return
        held = self._payload(self._held)
        rest, tail = whole_events(held), self.upstream.reader.tail
        tail = tail[: max(len(tail) - len(held) + len(rest), 0)]
        last = error_event(exchange.request.head.target, tail, code=why.code, message=why.message)
        exchange.client.answer_cut_off(self._framed(rest + last))

    # What the frames of chunks make of it

    def _piece(self, data: bytes) -> bytes:
        """Return what came as the client gets it."""
        return data

    def _is_whole(self, piece: bytes) -> bool:
        """Return whether `piece` ends with a line, and with its frame."""
        return piece.endswith(b"\n\r\n") and not self.upstream.reader.in_chunk

    def _payload(self, pieces: bytes) -> bytes:
        """Return the payload of pieces as the client gets them."""
        return unframed(pieces)

    def _framed(self, payload: bytes) -> bytes:
        """Return payload as the client gets it."""
        return chunk(payload)


class StreamingDechunked(Streaming):
    """In this phase events go to a client too old for chunks (nginx is one by default), without
    their frames."""

    __slots__ = ()

    def _piece(self, data: bytes) -> bytes:
        return self.upstream.reader.payload

    def _is_whole(self, piece: bytes) -> bool:
        return not piece or piece.endswith(b"\n")

    def _payload(self, pieces: bytes) -> bytes:
        return pieces

    def _framed(self, payload: bytes) -> bytes:
        return payload


class Dechunking(Relaying):
    """In this phase the answer goes to a client too old for chunks, without their frames."""

    __slots__ = ()

    def passed(self, data: bytes) -> bytes:
        """Return the payload of what has come."""
        return self.upstream.reader.payload

    def answer_bytes(self, data: bytes) -> None:
        """Pass the payload of a part of the body on to the client."""
        self.attempt.exchange.client.write(self.upstream.reader.payload)


class Discarding(Sent):
    """In this phase the worker's admission has said no: its answer is read to its end and not
    passed on.

    Nothing is wrong with the worker, and another one may say yes.
    """

    __slots__ = ("refusal",)

    def __init__(
        self, attempt: Attempt, upstream: UpstreamConnection, refusal: WorkerRefusal
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.refusal = refusal

    def answer_bytes(self, data: bytes) -> None:
        """Drop the refusal's text, which is nobody's."""

    def answer_end(self, tail: bytes) -> None:
        """Decide again, as the refusal is whole: its connection may carry the next turn."""
        self.attempt.exchange.decide_again(self.attempt, self.refusal)

    def answer_broken(self, failure: Failure) -> None:
        """Decide again: a refusal that stops in its middle is one all the same."""
        self.attempt.exchange.decide_again(self.attempt, self.refusal)


def give_back(place: HeldPlace | None) -> None:
    """Give the place back that was held for a turn which won't take it; None is no place."""
    if place is not None:
        place.give_back()
