"""One request's life in the gateway, from Arrive to its receipt's end.

Owns the receipt: it is given back exactly once, on whichever of these paths comes first.

    start ─ Arrive ─> connecting ─> waiting ─ first byte ─> relaying ─ end ─> Done
                         │ │           │ │                     │ │
                         │ └─ Failed ──┘ │   (Dispatch again, or Refuse)
                         └── Aborted ────┴──── Aborted ────────┘ └── Broken
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from ownerserve.kv.errors import InvalidInput
from ownerserve.router.gateway.heads import ResponseHead
from ownerserve.router.gateway.replies import Rejected, refused
from ownerserve.router.gateway.requests import Request
from ownerserve.router.identity import ANONYMOUS, Identity, identify, response_alias
from ownerserve.router.messages import (
    Aborted,
    Arrive,
    Broken,
    Dispatch,
    Done,
    Failed,
    Failure,
    FirstByte,
    Reason,
    Receipt,
    Refuse,
    SessionEnd,
)
from ownerserve.router.scan import NO_FIELDS, scan
from ownerserve.router.usage import TAIL_BYTES, scan_response_id, scan_usage

if TYPE_CHECKING:
    from ownerserve.router.gateway.client import ClientConnection
    from ownerserve.router.gateway.service import Gateway
    from ownerserve.router.gateway.upstream import UpstreamConnection

_REASON_LINE = {reason: b"x-ownerserve-reason: %b\r\n" % reason.value.encode() for reason in Reason}


def who_asks(request: Request) -> Identity:
    """The request's session. Raises Rejected when the body is needed and can't be believed.

    A request without a body (a listing of models) is no turn of a session. A header that names
    the session spares the scan: the router then acts on nothing in the body.
    """
    if not request.body:
        return ANONYMOUS
    head = request.head
    identity = identify(head.special, NO_FIELDS, tenant=head.tenant)
    if identity.session is not None:
        return identity
    special = head.special
    if special.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Rejected(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "content_encoding",
            "content-encoding: a compressed body can't be routed; send it plain",
        )
    is_json = special.get(b"content-type", b"").lower().startswith(b"application/json")
    if not (is_json or request.body.lstrip()[:1] == b"{"):
        return identity
    try:
        return identify(special, scan(request.body), tenant=head.tenant)
    except InvalidInput as error:
        raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_body", str(error)) from error


class Exchange:
    """One request, its dispatches, its answer."""

    __slots__ = (
        "_alias",
        "_client",
        "_connecting",
        "_dechunk",
        "_dispatch",
        "_gateway",
        "_identity",
        "_receipt",
        "_started_s",
        "_upstream",
        "request",
        "request_id",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        self.request = request
        self.request_id = request.head.request_id or gateway.next_request_id()
        self._gateway = gateway
        self._client = client
        self._identity: Identity | None = None
        self._dispatch: Dispatch | None = None
        self._receipt: Receipt | None = None
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._started_s = gateway.now()
        self._dechunk = False
        self._alias: str | None = None

    def start(self) -> None:
        """Decide, and send. Answers the client itself when there is nothing to send."""
        request, gateway = self.request, self._gateway
        try:
            self._identity = identity = who_asks(request)
        except Rejected as rejected:
            self._client.answer_rejected(rejected, self.request_id)
            return
        event = Arrive(session=identity.session, prompt_bytes=len(request.body))
        self._follow(gateway.state.handle(event, self._started_s))

    def abort(self) -> None:
        """The client hung up: so do we, and the engine can stop."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        if self._receipt is not None:
            self._gateway.state.handle(Aborted(self._take_receipt()), self._gateway.now())

    def pause(self) -> None:
        """The client reads too slowly."""
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # Sending

    def _follow(self, outcome: Dispatch | Refuse) -> None:
        self._gateway.observer.decided(self.request_id, self._identity, outcome)
        if isinstance(outcome, Refuse):
            self._client.answer_rejected(refused(outcome.refusal), self.request_id)
            return
        self._dispatch, self._receipt = outcome, outcome.receipt
        pool = self._gateway.pools[outcome.worker]
        kept = None if outcome.reason is Reason.RETRY_NEW_CONNECTION else pool.take()
        if kept is not None:
            self._send(kept)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

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
        head, body = self.request.head, self.request.body
        self._upstream = upstream
        upstream.send(
            head.to_worker(self.request_id, len(body)), body, method=head.method, sink=self
        )

    # The answer (upstream.Sink)

    def answer_begin(self, head: ResponseHead, first: bytes) -> None:
        dispatch, upstream, gateway = self._dispatch, self._upstream, self._gateway
        assert dispatch is not None
        assert upstream is not None
        now = gateway.now()
        gateway.state.handle(FirstByte(dispatch.receipt), now)
        gateway.observer.first_byte(now - self._started_s)
        if head.chunked and self.request.head.version == b"1.0":
            self._dechunk = True
            head, first = head.unchunked(), upstream.payload()
        if self.request.head.target.startswith(b"/v1/responses"):
            self._alias = scan_response_id(first[:TAIL_BYTES])
        if head.ends_by_close:
            self._client.close_after_answer()
        stamp = b"x-ownerserve-worker: %b\r\n%bx-request-id: %b\r\n%b" % (
            dispatch.worker.encode(),
            _REASON_LINE[dispatch.reason],
            self.request_id,
            self._client.connection_line,
        )
        self._client.write(head.to_client(stamp) + first)

    def answer_bytes(self, data: bytes) -> None:
        if self._dechunk:
            assert self._upstream is not None
            data = self._upstream.payload()
        self._client.write(data)

    def answer_end(self, tail: bytes) -> None:
        gateway, identity = self._gateway, self._identity
        assert identity is not None
        now = gateway.now()
        usage = scan_usage(tail)
        alias = self._alias and response_alias(self.request.head.tenant, self._alias)
        gateway.state.handle(Done(self._take_receipt(), usage, alias or None), now)
        if identity.final and identity.session is not None:
            gateway.state.handle(SessionEnd(identity.session), now)
        gateway.observer.finished(now - self._started_s, usage)
        self._client.answer_complete()

    def answer_failed(self, failure: Failure) -> None:
        self._upstream = None
        event = Failed(self._take_receipt(), failure)
        self._follow(self._gateway.state.handle(event, self._gateway.now()))

    def answer_broken(self) -> None:
        self._upstream = None
        self._gateway.state.handle(Broken(self._take_receipt()), self._gateway.now())
        self._client.answer_cut_off()

    def _take_receipt(self) -> Receipt:
        receipt, self._receipt = self._receipt, None
        assert receipt is not None
        return receipt
