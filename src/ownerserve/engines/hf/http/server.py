"""This module is the worker's HTTP side: OpenAI-compatible endpoints over one engine.

Owns no state: it parses, submits, relays events, and gives a request up when its client is gone.
It never computes, and never answers /health by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ownerserve.engines.hf.build import HfWorker
from ownerserve.engines.hf.engine.commands import EngineDead
from ownerserve.engines.hf.engine.moving import request_of
from ownerserve.engines.hf.http.answering import (
    ApiError,
    ChatFormat,
    ClientGone,
    CompletionFormat,
    EventStream,
    Format,
    check_target,
    collect,
    error_response,
    failure,
    json_response,
    load_headers,
    turn_headers,
    while_connected,
)
from ownerserve.engines.hf.http.leaving import WorkerLeave
from ownerserve.engines.hf.http.openai_api import (
    Body,
    ChatBody,
    CompletionBody,
    ModelNotFound,
    chat_prompt,
    completion_prompt,
    make_request,
    parse_body,
    told_of,
)
from ownerserve.engines.hf.http.prompt_leg import answer_leg
from ownerserve.engines.hf.http.role import NotIdle, StatedRole, read_asked_role
from ownerserve.engines.hf.metrics.prometheus import render
from ownerserve.engines.hf.metrics.status import HfStatus
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    AnswerForm,
    EngineRequest,
    Envelope,
    RequestFailed,
    ResponseOptions,
)
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import PrefixSalt
from ownerserve.kv.wire.headers import MODEL_HEADER, TurnLine, received_turn_line
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import NEWS_WAIT_MS
from ownerserve.kv.wire.status import ROLES
from ownerserve.node.ownership.ownership import OwnerIs

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
HEALTH_TIMEOUT_S = 10.0
"""Longer than any step: an engine thread that takes no command for so long is stuck."""
REQUEST_ID = "x-request-id"
"""How a gateway calls a request, whichever worker has it."""
CHAT, COMPLETION = "chatcmpl", "cmpl"
"""The endpoints, as their answers' ids begin."""
CLIENT_GONE = 499
"""nginx's word for a client that hung up; nobody reads it but the log."""


# ---- endpoints


class Endpoints:
    """`Endpoints` are the HTTP routes over one worker."""

    def __init__(
        self, worker: HfWorker, rpc: str | None, role: StatedRole, *, leaving: WorkerLeave | None
    ) -> None:
        self._worker = worker
        self._rpc = rpc
        self._role = role
        self._leaving = leaving
        self._started_s = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes, each with its method."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/ownerserve/status", self.status, methods=["GET"]),
            Route("/ownerserve/cache", self.cache, methods=["GET"]),
            Route("/ownerserve/inventory", self.inventory, methods=["GET"]),
            Route("/ownerserve/role", self.role, methods=["POST"]),
        ]

    async def models(self, http: HttpRequest) -> Response:
        """Answer the list of the one model that is served."""
        facts = self._worker.facts
        model = {
            "id": facts.model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "ownerserve",
            "max_model_len": facts.sequence_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def health(self, http: HttpRequest) -> Response:
        """Answer 200 only if the engine thread itself answers; else 503."""
        status = await self._status()
        load = self._worker.engine.latest
        headers = {**load_headers(load), MODEL_HEADER: self._worker.facts.model}
        return json_response({"status": "ok", "as_of_s": status.load.as_of_s}, headers=headers)

    async def status(self, http: HttpRequest) -> Response:
        """Answer with the engine thread's record (kv.wire.status), the worker's role, and where the
        node's RPC port is."""
        status = await self._status()
        profile = msgspec.structs.replace(
            status.profile,
            rpc=self._rpc,
            role=self._role.now,
            leaving=self._leaving is not None and self._leaving.is_under_way,
        )
        return json_response(msgspec.structs.replace(status, profile=profile))

    async def role(self, http: HttpRequest) -> Response:
        """Take another role on, while nothing runs or waits here."""
        asked = read_asked_role(http.headers.get("content-type", ""), await _read_body(http))
        came = self._role.flip(asked, (await self._status()).load)
        if isinstance(came, NotIdle):
            raise ApiError(409, str(came), code="not_idle", param="role")
        return json_response(came)

    async def cache(self, http: HttpRequest) -> Response:
        """Answer the cache's counters and levels, as the engine thread gives them."""
        return json_response(await self._in_time(self._worker.engine.cache(HEALTH_TIMEOUT_S)))

    async def inventory(self, http: HttpRequest) -> Response:
        """Answer with a page of what is held here, of the words after number `after`; where there
        is none, of the next one, waiting for `wait_ms`, NEWS_WAIT_MS at most."""
        asked = {"after": "0", "wait_ms": "0", **http.query_params}
        for name in ("after", "wait_ms"):
            if not (asked[name].isascii() and asked[name].isdigit() and len(asked[name]) < 19):
                mend = "send a page's last, or 0" if name == "after" else "send milliseconds"
                raise InvalidInput(name, f"{asked[name]!r} is no number", mend)
        wait_s = min(int(asked["wait_ms"]), NEWS_WAIT_MS) / 1e3
        page = self._worker.engine.inventory(int(asked["after"]), HEALTH_TIMEOUT_S, wait_s=wait_s)
        return json_response(await self._in_time(page))

    async def metrics(self, http: HttpRequest) -> Response:
        """Answer the Prometheus metrics."""
        content = self._worker.metrics.render()
        with suppress(EngineDead, TimeoutError):  # the rest is still worth a scrape
            content += render(await self._worker.engine.cache(HEALTH_TIMEOUT_S))
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def chat(self, http: HttpRequest) -> Response:
        """Answer a chat completion, whole or as a stream."""
        data, line = await _read_body(http), received_turn_line(http.headers)
        if line is not None and line.joins is not None:
            return await self._answer(http, await self._going_on(http, line, line.joins))
        body = parse_body(data, ChatBody)
        prompt = await asyncio.to_thread(chat_prompt, body, self._worker.codec)
        return await self._answer(http, await self._request(http, line, body, prompt))

    async def completions(self, http: HttpRequest) -> Response:
        """Answer a text completion, whole or as a stream."""
        data, line = await _read_body(http), received_turn_line(http.headers)
        if line is not None and line.joins is not None:
            return await self._answer(http, await self._going_on(http, line, line.joins))
        body = parse_body(data, CompletionBody)
        prompt = await asyncio.to_thread(completion_prompt, body, self._worker.codec)
        return await self._answer(http, await self._request(http, line, body, prompt))

    # ---- parts

    async def _status(self) -> HfStatus:
        return await self._in_time(self._worker.engine.status(HEALTH_TIMEOUT_S))

    async def _in_time(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except TimeoutError as error:
            message = f"the engine thread has taken no command for {HEALTH_TIMEOUT_S:g} s"
            raise ApiError(503, message, code="engine_stuck", param=None) from error

    async def _request(
        self,
        http: HttpRequest,
        line: TurnLine | None,
        body: ChatBody | CompletionBody,
        prompt: list[int],
    ) -> EngineRequest:
        if line is not None:
            check_target(line.target, self._worker.engine.latest.unit.incarnation)
        request = make_request(
            body,
            prompt,
            facts=self._worker.facts,
            request_id=uuid.uuid4().hex,
            turn=told_of(http.headers, body, line),
            fresh_seed=secrets.randbits(63),
        )
        _log(http, request)
        told_id = "" if line is None else http.headers.get(REQUEST_ID, "")
        request = msgspec.structs.replace(request, told_id=told_id, form=self._form(body, request))
        return await self._hashed(request, prompt)

    async def _going_on(self, http: HttpRequest, line: TurnLine, tokens: int) -> EngineRequest:
        """Return the request of a turn that was moved here amid its answer, of which the client has
        so many tokens."""
        check_target(line.target, self._worker.engine.latest.unit.incarnation)
        transfers, told_id = self._worker.transfers, http.headers.get(REQUEST_ID, "")
        turns = None if transfers is None else transfers.coming_turns
        kept = None if turns is None else turns.claim(told_id, tokens)
        if kept is None:
            reason = WorkerRefusal.UNKNOWN_TURN
            raise ApiError(409, "no such turn was moved here", code=reason.value, param=None)
        request = request_of(kept.state, request_id=uuid.uuid4().hex, source=kept.source)
        _log(http, request)
        return await self._hashed(request, request.prompt)

    async def _hashed(self, request: EngineRequest, prompt: Sequence[int]) -> EngineRequest:
        """Return the request with its prompt's digests, and the prompt in one piece of memory."""
        salt = PrefixSalt(request.cache_salt)
        prefix = await asyncio.to_thread(self._worker.prefixes.of, prompt, request.session_id, salt)
        # One piece of memory: to free a million integers would take the engine's thread 20 ms.
        tokens = prefix.plain(0, prefix.count)
        return msgspec.structs.replace(request, prefix=prefix, prompt=tokens)

    def _owner_of(self, request: EngineRequest) -> OwnerIs | None:
        """Return the owner of the turn's session, as far as it is known here."""
        if not request.is_named or request.session_id is None:
            return None
        return self._worker.ownership.owner_of(SessionId(request.session_id))

    def _form(self, body: Body, request: EngineRequest) -> AnswerForm:
        endpoint = CHAT if isinstance(body, ChatBody) else COMPLETION
        envelope = Envelope(
            f"{endpoint}-{request.request_id}", int(time.time()), self._worker.facts.model
        )
        options = body.stream_options
        shown = ResponseOptions(
            token_ids=bool(body.return_token_ids),
            stream_usage=bool(body.stream and options and options.include_usage),
        )
        return AnswerForm(endpoint, bool(body.stream), envelope, shown)

    async def _answer(self, http: HttpRequest, request: EngineRequest) -> Response:
        """Submit, wait for admission (headers carry what came of it), then stream or collect."""
        if request.is_prefill:
            return await answer_leg(self._worker, request, http.receive)
        engine, how = self._worker.engine, request.form
        assert how is not None, "every request has one"
        kind = ChatFormat if how.endpoint == CHAT else CompletionFormat
        form: Format = kind(how.envelope, request, self._worker.codec, how.options)
        stream = engine.submit(request)

        def give_up() -> None:
            engine.abort(request.request_id)

        is_handed_on = False
        try:
            first = await while_connected(http.receive, stream.next())
            if isinstance(first, RequestFailed):
                raise failure(first)
            assert isinstance(first, Admitted)
            headers = turn_headers(request, first, engine.latest, self._owner_of(request))
            if how.is_streamed:
                is_handed_on = True
                return EventStream(stream, form, give_up=give_up, headers=headers)
            deltas, finished = await while_connected(http.receive, collect(stream))
            return json_response(form.whole(deltas, finished), headers=headers)
        finally:
            if not is_handed_on:
                give_up()


def _log(http: HttpRequest, request: EngineRequest) -> None:
    told = (http.headers.get(name, "-")[:128] for name in (REQUEST_ID, "traceparent"))
    logger.info("turn %s: request %a, trace %a", request.request_id, *told)


async def _read_body(http: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            message = f"the body is longer than {MAX_BODY_BYTES} bytes"
            raise ApiError(413, message, code="body_too_long", param=None)
        parts.append(part)
    return b"".join(parts)


# ---- the application


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    match error:
        case ApiError():
            return error_response(error)
        case ModelNotFound():
            return _error(404, error, code="model_not_found", param=error.field)
        case InvalidInput():
            return _error(400, error, param=error.field)
        case EngineDead():
            return _error(503, error, code=WorkerRefusal.ENGINE_DEAD.value)
        case HTTPException():
            return _error(error.status_code, error.detail)
        case ClientGone() | ClientDisconnect():
            return Response(status_code=CLIENT_GONE)
        case _:  # our bug: the middleware that called this raises it again, into the log
            return _error(500, "internal error; the worker's log has it")


def _error(
    status: int, problem: object, *, code: str | None = None, param: str | None = None
) -> Response:
    return error_response(ApiError(status, str(problem), code=code, param=param))


def make_app(
    worker: HfWorker,
    *,
    rpc: str | None = None,
    role: str = ROLES[0],
    leaving: WorkerLeave | None = None,
) -> Starlette:
    """Make the ASGI application, whose lifespan is the engine thread's. `rpc` is the node's RPC
    address, `role` what the worker says that it takes of turns, `leaving` how it ends; None: at
    once."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.engine.start()
        try:
            yield
        finally:
            await worker.engine.stop()

    handled: tuple[type[Exception], ...] = (
        *(ApiError, InvalidInput, EngineDead, HTTPException),
        *(ClientGone, ClientDisconnect, Exception),
    )
    return Starlette(
        routes=Endpoints(worker, rpc, StatedRole(role), leaving=leaving).routes(),
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(handled, _on_error),
    )
