"""This module turns an engine's events into HTTP answers: OpenAI's objects, server-sent events,
errors, hang-ups.

A `Format` shapes deltas into OpenAI response objects and knows neither HTTP nor the engine. The
rest owns no state but the stream it is handed, and gives that up however the answer ends.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ownerserve.engines.hf.engine.commands import RequestStream
from ownerserve.engines.hf.model.text import ChatCodec
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    Delta,
    EngineRequest,
    Envelope,
    RequestFailed,
    RequestFinished,
    RequestMoved,
    ResponseOptions,
    Sampled,
    TokenLogprob,
)
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    BROUGHT_HEADER,
    CACHED_TOKENS_HEADER,
    EPOCH_HEADER,
    LOST_TOKENS_HEADER,
    MODE_HEADER,
    PLAN_HEADER,
    PROMPT_TOKENS_HEADER,
    REFUSAL_HEADER,
    RESTORE_HEADER,
    TURN_HEADER,
    VERSION_HEADER,
    AnswerLine,
    brought_text,
    encode_answer_line,
    moved_comment,
)
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import WorkerLoad, load_statement
from ownerserve.node.ownership.ownership import OwnerIs

# ---- OpenAI's response objects


Json = dict[str, Any]


class Format(ABC):
    """A `Format` writes one answer: chunks as they come, or the whole at the end."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, envelope: Envelope, request: EngineRequest, codec: ChatCodec, options: ResponseOptions
    ) -> None:
        self._envelope = envelope
        self.request = request
        self._codec = codec
        self._options = options
        # Characters of choice i so far, as its tokens are shown (completions' text_offset).
        self._shown = [0] * request.choices
        if request.said is not None and request.said.whole is None:
            self._shown[0] = sum(len(codec.show(token)) for token in request.said.tokens)

    # ---- what the two endpoints differ in

    @abstractmethod
    def opening(self) -> Iterator[Json]:
        """Yield the chunks before the first delta."""

    @abstractmethod
    def _delta_body(self, text: str) -> Json: ...

    @abstractmethod
    def _whole_body(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json: ...

    # ---- what they share

    def chunk(self, delta: Delta) -> Json | None:
        """Return the delta as a stream chunk; None when there is nothing to show yet."""
        has_details = self.request.sampling.logprobs is not None or self._options.token_ids
        if not (delta.text or delta.finish or has_details):
            return None
        choice = self._choice(delta, self._delta_body(delta.text))
        return self._object(self.chunk_object, [choice])

    def closing(self, finished: RequestFinished) -> Json | None:
        """Return the usage chunk; None where it was not asked for."""
        if not self._options.stream_usage:
            return None
        return {**self._object(self.chunk_object, []), "usage": usage(finished)}

    def whole(self, deltas: Sequence[Delta], finished: RequestFinished) -> Json:
        """Return the answer at once, from all its deltas in order."""
        choices = []
        for i in range(self.request.choices):
            own = [delta for delta in deltas if delta.index == i]
            text = "".join(delta.text for delta in own)
            sampled = tuple(token for delta in own for token in delta.sampled)
            joined = Delta(i, text, sampled, own[-1].finish)
            choices.append(self._choice(joined, self._whole_body(text)))
        answer = {**self._object(self.whole_object, choices), "usage": usage(finished)}
        if self._options.token_ids:
            answer["prompt_token_ids"] = list(self.request.prompt[: self.request.prompt_tokens])
        return answer

    def _object(self, kind: str, choices: list[Json]) -> Json:
        envelope = self._envelope
        body: Json = {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created_s,
            "model": envelope.model,
            "choices": choices,
        }
        if kind == self.chunk_object and self._options.stream_usage:
            body["usage"] = None
        return body

    def _choice(self, delta: Delta, body: Json) -> Json:
        choice: Json = {
            "index": delta.index,
            **body,
            "logprobs": None,
            "finish_reason": delta.finish.value if delta.finish else None,
        }
        if self.request.sampling.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta.index, delta.sampled)
        if self._options.token_ids:
            choice["token_ids"] = [sampled.token for sampled in delta.sampled]
        return choice


class ChatFormat(Format):
    """`ChatFormat` writes the objects of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for i in range(self.request.choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._object(self.chunk_object, [choice])

    def _delta_body(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _whole_body(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json:
        return {
            "content": [
                {
                    **self._token(token.chosen),
                    "top_logprobs": [self._token(other) for other in token.top],
                }
                for token in sampled
                if token.chosen is not None
            ],
            "refusal": None,
        }

    def _token(self, token: TokenLogprob) -> Json:
        return {
            "token": self._codec.show(token.token),
            "logprob": token.logprob,
            "bytes": list(self._codec.token_bytes(token.token)),
        }


class CompletionFormat(Format):
    """`CompletionFormat` writes the objects of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def opening(self) -> Iterator[Json]:
        return iter(())

    def _delta_body(self, text: str) -> Json:
        return {"text": text}

    _whole_body = _delta_body

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json:
        tokens = [self._codec.show(token.token) for token in sampled]
        offsets = []
        for text in tokens:
            offsets.append(self._shown[index])
            self._shown[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [t.chosen.logprob for t in sampled if t.chosen is not None],
            "top_logprobs": [
                {self._codec.show(other.token): other.logprob for other in token.top}
                for token in sampled
            ],
            "text_offset": offsets,
        }


def usage(finished: RequestFinished) -> Json:
    """Return the `usage` object of a finished request, in tokens."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


STATUS_OF_REASON = {
    WorkerRefusal.CONTEXT_LENGTH: 400,
    WorkerRefusal.QUEUE_FULL: 429,
    WorkerRefusal.NO_ROOM: 503,
    WorkerRefusal.DRAINING: 503,
    WorkerRefusal.ENGINE_DEAD: 503,
    WorkerRefusal.UNKNOWN_RESERVATION: 409,
}

REFUSING = (409, 429, 503)
"""With these the worker would not take the turn: another one may."""

T = TypeVar("T")


class ApiError(Exception):
    """An `ApiError` is answered as an error in OpenAI's form, with HTTP status `status`."""

    def __init__(self, status: int, message: str, *, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """`body` is the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


class ClientGone(Exception):
    """The client has hung up before its answer was ready."""


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Encode `body` as a JSON response."""
    data = msgspec.json.encode(body)
    return Response(data, status, headers=headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return the error as OpenAI's object, with `retry-after` (1 s) for 429 and 503, and the
    refusal's code for gateways where another worker may take the turn."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.code is not None and error.status in REFUSING:
        headers[REFUSAL_HEADER] = error.code
    return json_response(error.body(), error.status, headers)


def failure(event: RequestFailed) -> ApiError:
    """Return the error that a failed request is answered with."""
    return ApiError(
        STATUS_OF_REASON[event.reason], event.message, code=event.reason.value, param=None
    )


def turn_headers(
    request: EngineRequest, admitted: Admitted, load: WorkerLoad, owner: OwnerIs | None
) -> dict[str, str]:
    """Return the answer's headers: how the prompt was served, for people, and the line for
    gateways. `owner` is that of the turn's session; None: nobody is known."""
    return {
        "x-request-id": request.request_id,
        MODE_HEADER: admitted.mode.value,
        CACHED_TOKENS_HEADER: str(admitted.cached_tokens),
        **({RESTORE_HEADER: admitted.restore} if admitted.restore else {}),
        **({BROUGHT_HEADER: brought_text(admitted.brought)} if admitted.brought else {}),
        **({PLAN_HEADER: admitted.plan} if admitted.plan else {}),
        **({LOST_TOKENS_HEADER: str(admitted.lost_tokens)} if admitted.lost_tokens else {}),
        PROMPT_TOKENS_HEADER: str(request.prompt_tokens),
        **(_owner_headers(owner) if owner is not None and owner.version is not None else {}),
        ANSWER_HEADER: encode_answer_line(_line_of(request, admitted, load, owner)).decode(),
    }


def load_headers(load: WorkerLoad) -> dict[str, str]:
    """Return the answer line of a worker that serves no turn, with its unit and its load, for
    /health."""
    line = AnswerLine(unit=load.unit, load=load_statement(load))
    return {ANSWER_HEADER: encode_answer_line(line).decode()}


def _line_of(
    request: EngineRequest, admitted: Admitted, load: WorkerLoad, owner: OwnerIs | None
) -> AnswerLine:
    """Return the line that gateways read. The device holds the prompt's full blocks once the turn
    is computed."""
    prefix = request.prefix
    tip = None if prefix is None else prefix.tip
    return AnswerLine(
        unit=load.unit,
        load=load_statement(load),
        owner=None if owner is None else owner.unit,
        epoch=None if owner is None else owner.epoch,
        version=None if owner is None else owner.version,
        tip=None if tip is None else tip.hex(),
        tokens=0 if prefix is None or tip is None else prefix.blocks * prefix.block_tokens,
        mode=admitted.mode,
        lost_tokens=admitted.lost_tokens,
    )


def _owner_headers(owner: OwnerIs) -> dict[str, str]:
    """Return the headers that tell people under which epoch and at which version this worker owns
    the session."""
    epoch = owner.epoch
    told = f"{epoch.term.ordinal}.{epoch.term.nonce}.{epoch.counter}"
    return {EPOCH_HEADER: told, VERSION_HEADER: str(owner.version)}


def check_target(target: RoutingUnit | None, incarnation: int) -> None:
    """Raise ApiError for a turn that is meant for another worker, or another life of this one.

    Two that count on their own part ways sooner or later (seed 003, v2): the one who is named
    checks. The life tells workers apart too: it is the nanosecond in which one was built. The
    worker's id is not compared, since a gateway names a worker by the address at which it reaches
    it, and no worker knows all of its own (localhost, 0.0.0.0, a mapped port): a wrong refusal
    would cost more than the check can find.
    """
    if target is None or (target.dp_rank, target.incarnation) == (0, incarnation):
        return
    message = (
        f"{TURN_HEADER}.target: {target.worker}, rank {target.dp_rank} in life "
        f"{target.incarnation} is not this worker, rank 0 in life {incarnation}"
    )
    raise ApiError(409, message, code="wrong_target", param=None)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; when the client hangs up first, cancel it and raise
    ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An `EventStream` sends a request's events as server-sent events and gives the request up
    however it ends."""

    def __init__(
        self,
        stream: RequestStream,
        form: Format,
        *,
        give_up: Callable[[], None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._stream = stream
        self._form = form
        self._give_up = give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._relay(send))
        except ClientGone:
            pass
        finally:
            self._give_up()

    async def _relay(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for line in self._lines():
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _lines(self) -> AsyncIterator[bytes]:
        if self._form.request.said is None:
            for chunk in self._form.opening():
                yield _event(chunk)
        async for event in self._stream:
            match event:
                case Delta():
                    if (shown := self._form.chunk(event)) is not None:
                        yield _event(shown)
                case RequestFinished():
                    if (closing := self._form.closing(event)) is not None:
                        yield _event(closing)
                    yield b"data: [DONE]\n\n"
                case RequestFailed():  # no [DONE]: the answer is not complete
                    yield _event(failure(event).body())
                case RequestMoved(tokens):  # nor is this one; a comment is nobody's event
                    yield moved_comment(tokens)


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def collect(stream: RequestStream) -> tuple[list[Delta], RequestFinished]:
    """Read the stream to its end and return its deltas and the final event. Raises ApiError
    where the request fails."""
    deltas: list[Delta] = []
    async for event in stream:
        match event:
            case Delta():
                deltas.append(event)
            case RequestFinished():
                return deltas, event
            case RequestFailed():
                raise failure(event)
            case RequestMoved():
                reason = WorkerRefusal.MOVED
                raise ApiError(503, "it goes on elsewhere", code=reason.value, param=None)
    raise AssertionError("a stream ends with Finished or Failed")
