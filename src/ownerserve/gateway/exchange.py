"""One request's life in the gateway, from Arrive to its receipt's end.

Owns the receipt: it is given back exactly once, on whichever of these paths comes first.

    start ─ Arrive ─> connecting ─> waiting ─ first byte ─> relaying ─ end ─> Done
                         │ │           │ │                     │ │
                         │ └─ Failed ──┘ │   (Dispatch again, or Refuse)
                         └── Aborted ────┴──── Aborted ────────┘ └── Broken

A worker's refusal is read to its end and not passed on: the next candidate is asked. Only when no
other is left, or the retry budget is used up, the client hears it, as 429.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ownerserve.gateway.asking import Asked
from ownerserve.gateway.came import what_came
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import Rejected, fault, pressed, refused
from ownerserve.gateway.http.requests import Request
from ownerserve.gateway.manner import Manner, is_direct_append, is_turn, seed_of
from ownerserve.gateway.receipts import order_lines, receipt_lines, turn_line_of
from ownerserve.gateway.stamps import NOTHING, Stamp, answer_of, read_stamp, refusal_of
from ownerserve.gateway.workers.places import Place
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject
from ownerserve.kv.wire.turn_line import session_id_of
from ownerserve.router.decision import Reason
from ownerserve.router.messages import (
    Aborted,
    AskRelease,
    Broken,
    Claimed,
    Dispatch,
    Done,
    Failed,
    Failure,
    FirstByte,
    Receipt,
    Refuse,
    Reported,
    SessionEnd,
    Stamped,
    Unpromised,
)
from ownerserve.router.requests.body import (
    TAIL_BYTES,
    believed,
    place_of_prompt,
    scan_response_id,
    scan_usage,
    with_text,
)
from ownerserve.router.seats import Ticket
from ownerserve.router.sessions import Session

if TYPE_CHECKING:
    from ownerserve.gateway.http.client import ClientConnection
    from ownerserve.gateway.http.upstream import UpstreamConnection
    from ownerserve.gateway.service import Gateway

log = logging.getLogger("ownerserve.gateway")


class Exchange:
    """One request, its dispatches, its answer."""

    __slots__ = (
        "_alias",
        "_asked",
        "_client",
        "_connecting",
        "_dechunk",
        "_dispatch",
        "_gateway",
        "_head",
        "_is_inside",
        "_is_over",
        "_manner",
        "_place",
        "_receipt",
        "_refusal",
        "_stamp",
        "_started_s",
        "_ticket",
        "_tokens",
        "_upstream",
        "request",
        "request_id",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        self.request = request
        self.request_id = request.head.request_id or gateway.next_request_id()
        self._gateway = gateway
        self._client = client
        self._asked: Asked | None = None
        self._dispatch: Dispatch | None = None
        self._head: ResponseHead | None = None
        self._receipt: Receipt | None = None
        self._refusal: WorkerRefusal | None = None
        """Why the last worker that was asked said no."""
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._stamp = NOTHING
        self._started_s = gateway.now()
        self._manner = Manner.ASKING
        self._place: Place | None = None
        self._ticket: Ticket | None = None
        self._is_inside = self._is_over = False
        self._tokens = 0
        self._dechunk = False
        self._alias: str | None = None

    def start(self) -> None:
        """Decide, and send. Answers the client itself when there is nothing to send."""
        gateway = self._gateway
        try:
            self._asked = asked = gateway.asking.read(self.request)
        except Rejected as rejected:
            self._client.answer_rejected(rejected, self.request_id)
            return
        name = gateway.stranger(asked.arrive)
        if name is None:
            self._take_seat()
        else:
            self._run(self._look_up(name))

    def abort(self) -> None:
        """The client hung up: so do we, and the engine can stop."""
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()
        if self._ticket is not None:
            self._gateway.lobby.leave(self._ticket)
        if self._upstream is not None:
            self._upstream.abort()
        self._leave_place()
        if self._receipt is not None:
            self._gateway.state.handle(Aborted(self._take_receipt()), self._gateway.now())
        self._over()

    def pause(self) -> None:
        """The client reads too slowly."""
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # Sending

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._connecting = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The root of the request's tasks: one that ends badly ends the request, not in silence."""
        if task.cancelled() and task is not self._connecting:
            return  # by `abort`
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("request %s: a fault of the gateway's", self.request_id.decode(), exc_info=error)
        if self._is_over:  # nobody can say how much of an answer is written
            self._client.close()
            return
        self.abort()
        self._client.answer_rejected(fault(), self.request_id)

    def _take_seat(self) -> None:
        """A new session may have to wait until the fleet has room for it."""
        assert self._asked is not None
        self._ticket = self._gateway.lobby.enter(self._asked, self._decide)

    def _decide(self) -> None:
        gateway, asked = self._gateway, self._asked
        assert asked is not None
        self._ticket, self._is_inside = None, True
        self._follow(gateway.state.handle(asked.arrive, gateway.now()))

    def _follow(self, outcome: Dispatch | Refuse) -> None:
        gateway, asked = self._gateway, self._asked
        assert asked is not None
        gateway.observer.decided(self.request_id, asked.identity, outcome)
        if isinstance(outcome, Refuse):
            self._over()
            told = (
                refused(outcome.refusal) if self._refusal is None else pressed(self._refusal.value)
            )
            self._client.answer_rejected(told, self.request_id)
            return
        if outcome.reason is Reason.RETRY_UNASKED:
            self._manner = Manner.UNASKED
            gateway.observer.pressed("unasked", "all_refused")
        self._dispatch, self._receipt = outcome, outcome.receipt
        self._refusal = None
        if self._is_admitted(outcome) and not is_direct_append(outcome):
            self._run(self._ask())
        else:
            self._go()

    def _is_admitted(self, dispatch: Dispatch) -> bool:
        """Whether the worker's admission has a word in this: it can be asked, and by us."""
        return (
            self._manner is Manner.ASKING
            and self._gateway.places.can_ask(dispatch.worker)
            and is_turn(self.request.head)
        )

    async def _ask(self) -> None:
        """The worker's word before the turn is sent: nothing is promised without room."""
        gateway, dispatch = self._gateway, self._dispatch
        assert dispatch is not None
        seed = seed_of(dispatch, gateway.state.sessions)
        came = await gateway.places.reserve(dispatch.worker, self.request_id.decode(), seed)
        self._connecting = None
        if isinstance(came, Reject):
            self._refusal = came.reason
            self._refused_by_worker()
            return
        if came is None:
            gateway.observer.pressed("unasked", "no_word")
        self._place = came
        self._go()

    def _go(self) -> None:
        gateway, outcome = self._gateway, self._dispatch
        assert outcome is not None
        pool = gateway.pools[outcome.worker]
        kept = None if outcome.reason is Reason.RETRY_NEW_CONNECTION else pool.take()
        if kept is not None:
            self._send(kept)
        else:
            self._run(self._connect())

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.give_back()
            self._place = None

    async def _look_up(self, session: SessionId) -> None:
        """A session that is new here: the directory may know its owner."""
        gateway = self._gateway
        assert gateway.finder is not None
        await gateway.finder.look_up(session)
        self._connecting = None
        self._take_seat()

    async def _connect(self) -> None:
        assert self._dispatch is not None
        pool = self._gateway.pools[self._dispatch.worker]
        try:
            upstream = await pool.connect()
        except OSError:
            self._connecting = None
            self.answer_failed(Failure.CONNECT)
            return
        self._connecting = None
        self._send(upstream)

    def _send(self, upstream: UpstreamConnection) -> None:
        dispatch, asked = self._dispatch, self._asked
        assert dispatch is not None
        assert asked is not None
        head, body = self.request.head, self.request.body
        self._upstream = upstream
        line = turn_line_of(dispatch, asked, self._session(dispatch))
        if self._place is not None:
            line = structs.replace(line, reservation=self._place.number)
        elif self._is_admitted(dispatch) and is_direct_append(dispatch):
            line = structs.replace(line, judged=True)
        if asked.said is not None and line.name is not None:
            body = with_text(body, asked.said, session_id_of(line))
        sent = head.to_worker(
            self.request_id, len(body), orders=self._gateway.access.line + order_lines(line)
        )
        upstream.send(sent, body, method=head.method, sink=self)
        if self._place is not None:
            self._place.use()

    # The answer (upstream.Sink)

    def answer_begin(self, head: ResponseHead, first: bytes) -> None:
        dispatch, upstream, gateway = self._dispatch, self._upstream, self._gateway
        assert dispatch is not None
        assert upstream is not None
        self._head = head
        if head.status >= HTTPStatus.BAD_REQUEST:  # it may be so before the place was looked at
            self._leave_place()
        self._place = None
        now = gateway.now()
        self._stamp = stamp = read_stamp(dispatch.worker, head.stamp, gateway.observer.bad_lines)
        self._refusal = refusal_of(head.status, head.stamp)
        if self._refusal is not None:
            if stamp.status is not None:
                gateway.state.handle(Stamped(stamp.status), now)
            return
        answer = answer_of(head.status, stamp)
        gateway.state.handle(FirstByte(dispatch.receipt, stamp.status, answer), now)
        gateway.observer.first_byte(now - self._started_s)
        self._report(stamp, now)
        if head.chunked and self.request.head.version == b"1.0":
            self._dechunk = True
            head, first = head.unchunked(), upstream.payload()
        if self.request.head.target.startswith(b"/v1/responses"):
            self._alias = scan_response_id(first[:TAIL_BYTES])
        if head.ends_by_close:
            self._client.close_after_answer()
        lines = b"%bx-request-id: %b\r\n%b" % (
            receipt_lines(dispatch),
            self.request_id,
            self._client.connection_line,
        )
        self._client.write(head.to_client(lines) + first)

    def answer_bytes(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._dechunk:
            assert self._upstream is not None
            data = self._upstream.payload()
        self._client.write(data)

    def answer_end(self, tail: bytes) -> None:
        if self._refusal is not None:
            self._refused_by_worker()
            return
        gateway, asked, dispatch = self._gateway, self._asked, self._dispatch
        assert asked is not None
        assert dispatch is not None
        assert self._head is not None
        now = gateway.now()
        told = scan_usage(tail)
        usage = believed(told, dispatch.decision.worker.profile.sequence_tokens)
        self._tokens = 0 if usage is None else usage.prompt_tokens + usage.output_tokens
        came = what_came(self._stamp, usage, self._last_prompt(dispatch))
        alias = asked.alias(self._alias) if self._alias else None
        done = Done(self._take_receipt(), told, alias, prompt=place_of_prompt(asked.fields))
        ended = gateway.state.handle(done, now)
        if isinstance(ended, AskRelease) and asked.identity.final:
            gateway.releasing.end(ended)
        elif isinstance(ended, AskRelease):
            gateway.releasing.ask(ended)
        gateway.observer.finished(now - self._started_s, usage)
        gateway.observer.compared(dispatch, usage, came)
        self._over()
        if asked.identity.final and asked.arrive.session is not None:
            gateway.state.handle(SessionEnd(asked.arrive.session), now)
            gateway.asking.chain.forget(asked.arrive.session)
            gateway.lobby.over(asked.arrive)
        self._client.answer_complete()

    def answer_failed(self, failure: Failure) -> None:
        self._upstream = None
        self._leave_place()
        gateway = self._gateway
        gateway.observer.pressed("failed", failure.value)
        event = Failed(self._take_receipt(), failure)
        self._follow(gateway.state.handle(event, gateway.now()))

    def answer_broken(self) -> None:
        if self._refusal is not None:
            self._refused_by_worker()
            return
        self._upstream = None
        self._gateway.observer.pressed("failed", "broken")
        self._gateway.state.handle(Broken(self._take_receipt()), self._gateway.now())
        self._over()
        self._client.answer_cut_off()

    def _refused_by_worker(self) -> None:
        """Its admission said no: nothing is wrong with it, and another one may say yes."""
        self._upstream = None
        gateway = self._gateway
        assert self._refusal is not None
        gateway.observer.pressed("refused", self._refusal.value)
        receipt = self._take_receipt()
        has_no_room = self._refusal is WorkerRefusal.NO_ROOM
        event = Unpromised(receipt) if has_no_room else Failed(receipt, Failure.REFUSED)
        self._follow(gateway.state.handle(event, gateway.now()))

    def _report(self, stamp: Stamp, now: float) -> None:
        """The worker says where the prompt's state will be once the turn has run, and who owns the
        session."""
        gateway, dispatch, extent, owned = self._gateway, self._dispatch, stamp.extent, stamp.owned
        assert dispatch is not None
        session = dispatch.session
        if session is None:
            return
        if extent is not None:
            tip, tokens = extent.prefix_hash, extent.tokens
            report = Reported(stamp.unit, Tier.DEVICE, tip, tokens, session=session)
            gateway.state.handle(report, now)
        if owned is not None:
            owner = gateway.lives.here(owned.unit)
            gateway.claimed(Claimed(session, owner, owned.epoch, owned.version))

    def _last_prompt(self, dispatch: Dispatch) -> int:
        """Tokens of the session's last prompt, before this turn's end is told."""
        session = self._session(dispatch)
        return session.prompt_tokens if session else 0

    def _session(self, dispatch: Dispatch) -> Session | None:
        """The turn's session, as the router knows it now."""
        name = dispatch.session
        return None if name is None else self._gateway.state.sessions.get(name)

    def _over(self) -> None:
        """Nothing of the turn runs any more."""
        self._is_over = True
        if self._asked is not None:
            self._gateway.asking.ended(self._asked.identity)
            if self._is_inside:
                self._is_inside = False
                self._gateway.lobby.ended(self._asked.arrive, self._tokens)

    def _take_receipt(self) -> Receipt:
        receipt, self._receipt = self._receipt, None
        assert receipt is not None
        return receipt
