"""An exchange is one request's life in the gateway, from its arrival to its answer's end, as
phases.

An exchange is in one phase at a time, and a phase has only what exists in it. A dispatch's receipt
is given back exactly once: by whichever phase holds it when it ends.

    Reading ──> Queued ──> Deciding ─ Dispatch ─> Connecting ──> AwaitingHead ──> Relaying ─> over
    (whose      (before the   │  ^                    │ │            │   │            │
     is it?)     fleet)     Refuse └──── failed ──────┘ │            │   └ a refusal ─> Discarding
                              v    └──── refused ───────┴────────────┘        its end ─┘ (Deciding)
                            over

A client that hangs up ends any phase. A turn that the queue turns away has run nowhere; the client
of one that streams is told while it waits (holding.py). A worker's
refusal is read to its end and not passed on: the next candidate is asked. Only when no other is
left, or the retry budget is used up, the client hears it, as 429. What is decided, counted and said
of a turn is Turns' (turns.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from msgspec import structs

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.exchange.ahead import NOTHING_AHEAD, NothingAhead, ask_ahead
from ownerserve.gateway.exchange.attempt import Attempt, give_back
from ownerserve.gateway.exchange.awaiting import AwaitingHead
from ownerserve.gateway.exchange.begun import NOTHING_SAID, NothingSaid
from ownerserve.gateway.exchange.carrying import PartSaid
from ownerserve.gateway.exchange.hedge import hedge_later
from ownerserve.gateway.exchange.holding import hold
from ownerserve.gateway.exchange.leaving import NO_BODY, LeavingTurn
from ownerserve.gateway.exchange.phases import OVER, Connecting, Deciding, Phase, Queued, Reading
from ownerserve.gateway.exchange.port import LegPort, TurnPort
from ownerserve.gateway.exchange.prefill import begin_prefill
from ownerserve.gateway.exchange.refusing import refuse_unread, turn_away
from ownerserve.gateway.exchange.relaying import Relaying
from ownerserve.gateway.http.client import ClientConnection, HttpRequest
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.handing import Elsewhere
from ownerserve.gateway.http.replies import (
    STOPPED,
    CutShort,
    Rejected,
    fault,
    pressed,
    refused,
    too_late,
)
from ownerserve.gateway.http.upstream import UpstreamConnection
from ownerserve.gateway.stamps import TurnRefused
from ownerserve.gateway.turns import (
    Correction,
    EndedLeg,
    LookUp,
    LostDispatch,
    LostStream,
    Route,
    SentOn,
    Why,
)
from ownerserve.gateway.workers.rpc import HeldPlace, Manner, is_direct_append
from ownerserve.kv.wire.headers import TurnLine, session_id_of
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Broken, Failure, Refuse

log = logging.getLogger("ownerserve.gateway")


NOT_REFUSED = TurnRefused(WorkerRefusal.OTHER, 0, 0)


class Exchange:
    """An exchange is one request and its phase. `turns` decides and counts; `client` gets the
    answer."""

    __slots__ = (
        "__weakref__", "ahead", "asks_usage", "begun", "client", "leaving", "legs", "phase",
        "refused",
        "request", "request_id", "started_s", "turns",
    )  # fmt: skip

    def __init__(
        self,
        turns: TurnPort,
        legs: LegPort,
        client: ClientConnection,
        *,
        request: HttpRequest,
        request_id: bytes,
    ) -> None:
        self.turns = turns
        self.legs = legs
        self.client = client
        self.request = request
        self.request_id = request_id
        self.started_s = 0.0
        self.refused = NOT_REFUSED
        """What the workers' refusals come to so far."""
        self.begun: NothingSaid | PartSaid = NOTHING_SAID
        """What the client has of an answer, while no worker's goes to it."""
        self.asks_usage = False
        """Whether a worker was asked for a stream's usage that the client did not ask for: it is
        kept back, also when a reload has nobody asked from now on."""
        self.ahead: NothingAhead = NOTHING_AHEAD
        """The leg that has the prompt computed meanwhile; none once the answer begins."""
        self.leaving: LeavingTurn | None = None
        """Where the turn is to go on, of which a part is answered; None: it is to stay."""
        self.phase: Phase = OVER

    def start(self) -> None:
        """Read the request, decide and send it; answer the client itself when there is nothing to
        send. Raises Elsewhere for a request that is another process's to answer."""
        try:
            arrived = self.turns.read(self.request)
        except Elsewhere:
            raise
        except Rejected as rejected:
            refuse_unread(self, rejected)
            return
        except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
            self.log_fault(error)
            refuse_unread(self, fault())
            return
        asked, self.started_s = arrived.asked, arrived.at_s
        if arrived.look_up is None:
            try:
                self._enter(asked)
            except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
                self.failed(error)
        else:
            self.phase = Reading(self, asked, self.run(self._find(asked, arrived.look_up)))

    def abort(self) -> None:
        """End the exchange, as the client hung up: the worker's connection is closed, so that the
        engine can stop."""
        phase, self.phase = self.phase, OVER
        self.ahead.end()
        phase.abort()

    def stop(self) -> None:
        """End the exchange, as the gateway ends, with a word to the client where it can be said."""
        phase, self.phase = self.phase, OVER
        self.ahead.end()
        phase.abort()
        if isinstance(phase, Relaying):
            phase.cut_short(STOPPED)
        else:
            self.begun.stop(self)

    def pause(self) -> None:
        """Stop reading the answer: the client reads too slowly."""
        self.phase.pause()

    def resume(self) -> None:
        """Go on reading the answer: the client reads again."""
        self.phase.resume()

    # What phases do

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work of the present phase as a task; a fault in it is logged and ends the
        request."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _enter(self, asked: IdentifiedRequest) -> None:
        """Decide at once, or queue the turn: it may have to wait until the fleet has room for
        it, and may be turned away."""
        self.phase = queued = Queued(self, asked, self._decide)
        try:
            head, came_s = self.request.head, self.started_s
            queued.held = self.turns.enter(asked, head, queued, came_s=came_s)
            if queued.held is not None:
                hold(queued)
        except Rejected as rejected:
            turn_away(self, asked, rejected)
            self.phase = OVER
            self.client.answer_rejected(rejected, self.request_id)

    def _follow(self, asked: IdentifiedRequest, manner: Manner, route: Route | Refuse) -> None:
        """Send the turn where it was decided, or tell the client no."""
        if isinstance(route, Refuse):
            self._refuse(asked, refused(route.refusal))
            return
        if route.dispatch.reason in (DispatchReason.RETRY_UNASKED, DispatchReason.MOVED):
            manner = Manner.UNASKED
        attempt = Attempt(self, asked, route, manner)
        if route.dispatch.decision.prefill is None or route.prefiller is not None:
            ask_ahead(self, attempt)
            self.proceed(attempt)
        else:
            begin_prefill(attempt)

    def proceed(self, attempt: Attempt) -> None:
        """Bring the turn to its worker, which is asked for a place first where it holds places."""
        route = attempt.route
        if attempt.asks and not is_direct_append(route.dispatch):
            self.phase = Connecting(attempt, None, self.run(self._reserve(attempt)))
        else:
            self.connect(attempt, None)

    def decide_again(self, attempt: Attempt, why: Why) -> None:
        """Ask for another worker, or tell the client no, as nothing of an answer came, for the
        reason `why`; or go on with the turn's other leg."""
        if isinstance(why, Failure) and self.phase.goes_on_without(attempt, why):
            return
        self.ahead.end()
        asked = attempt.asked
        self.phase = Deciding(self, asked)
        if not self.begun.can_be_told_anew and why is not Failure.STALE:
            self.turns.ended(asked, Broken(attempt.dispatch.receipt))
            self.phase = OVER
            self.begun.reject(self, fault())
            return
        lost: EndedLeg = LostDispatch(attempt.dispatch, why)
        if why is WorkerRefusal.MOVED and self.leaving is not None:
            lost = self.leaving.sent_on(self, attempt)
        route = self.turns.decide(asked, lost, request_id=self.request_id)
        if isinstance(route, Refuse) and isinstance(why, WorkerRefusal):
            pressure = self.refused
            told = pressed(why.value, pressure.status, pressure.retry_after_s)
            self._refuse(asked, told)
        elif isinstance(route, Refuse) and why is Failure.LATE:
            self._refuse(asked, too_late())
        else:
            self._follow(asked, attempt.manner, route)

    def carry_on(self, attempt: Attempt, lost: LostStream | SentOn) -> None:
        """Send the turn to another worker, as its stream stops in its middle; what the client has
        of it stays."""
        asked = attempt.asked
        self.phase = Deciding(self, asked)
        self._follow(
            asked, Manner.UNASKED, self.turns.decide(asked, lost, request_id=self.request_id)
        )

    def connect(self, attempt: Attempt, place: HeldPlace | None) -> None:
        """Send the turn on a kept connection, or on a new one."""
        is_anew = attempt.dispatch.reason is DispatchReason.RETRY_NEW_CONNECTION
        kept = None if is_anew else attempt.route.pool.take()
        if kept is not None:
            self._send(attempt, place, kept)
        else:
            opening = Connecting(attempt, place, self.run(self._open(attempt, place)))
            self.phase = self.phase.with_leg(opening)

    def failed(self, error: BaseException) -> None:
        """End the request after a fault, not in silence: with an answer where none has begun."""
        self.log_fault(error)
        phase, self.phase = self.phase, OVER
        self.ahead.end()
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
            self.begun.fault(self)

    def log_fault(self, error: BaseException) -> None:
        """Log a fault of the gateway's own under the request's id."""
        log.error("request %s: a fault of the gateway's", self.request_id.decode(), exc_info=error)

    # The steps

    async def _find(self, asked: IdentifiedRequest, look_up: LookUp) -> None:
        """Ask the directory for the owner of a session that is new here, then go on."""
        await look_up()
        self._enter(asked)

    def _decide(self, asked: IdentifiedRequest) -> None:
        """Decide where the turn runs, and send it there. For a turn that waited this is called in
        the midst of another request's end: a fault ends this request and no other."""
        self.phase = Deciding(self, asked)
        try:
            self._follow(asked, Manner.ASKING, self.turns.decide(asked, request_id=self.request_id))
        except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
            self.failed(error)

    def _refuse(self, asked: IdentifiedRequest, told: Rejected) -> None:
        self.turns.ended(asked)
        self.phase = OVER
        self.begun.reject(self, told)

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
            upstream = await attempt.route.connect()
        except OSError as error:
            give_back(place)
            self.decide_again(attempt, Failure.OURS if is_ours(error) else Failure.CONNECT)
            return
        self._send(attempt, place, upstream)

    def _send(
        self, attempt: Attempt, place: HeldPlace | None, upstream: UpstreamConnection
    ) -> None:
        asked, route = attempt.asked, attempt.route
        head = self.request.head
        line = route.line(asked)
        if place is not None:
            line = structs.replace(line, reservation=place.number)
        elif attempt.is_judged and is_direct_append(route.dispatch):
            line = structs.replace(line, judged=True)
        if self.leaving is not None and self.leaving.went_to(route.dispatch):
            line, body = structs.replace(line, joins=self.leaving.tokens), NO_BODY
        else:
            body = self._body(attempt, line)
        sent = head.to_worker(self.request_id, sum(map(len, body)), orders=route.head_lines(line))
        awaiting = AwaitingHead(attempt, place, upstream)
        self.phase = self.phase.with_leg(awaiting)
        patience_s = self.turns.patience_s(asked)
        upstream.send(sent, body, method=head.method, sink=awaiting, patience_s=patience_s)
        if place is not None and self.phase is awaiting:
            place.use()
        if self.phase is awaiting:
            hedge_later(awaiting)

    def _body(self, attempt: Attempt, line: TurnLine) -> Sequence[bytes | memoryview]:
        """Return the body as the worker gets it."""
        asked = attempt.asked
        session_id = None if line.name is None else session_id_of(line)
        usage = self.legs.usage_saids(self.request.head.target, asked.fields)
        self.asks_usage = self.asks_usage or bool(usage)
        return asked.body_for(self.request.body, session_id, *attempt.saids, *usage)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the request when one of its tasks ends badly: this is the root of all of them."""
        if task.cancelled() and not self.phase.is_waiting_for(task):
            return  # by `abort`
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.failed(error)
