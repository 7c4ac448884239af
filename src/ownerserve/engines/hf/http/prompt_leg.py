"""A gateway's leg that computes a turn's prompt alone: the turn's other leg is at the worker that
answers, which asks this one for the prompt by the leg's number and reads it as it is computed.

    gateway ── the turn, prefill, nonce ──> here: begun, or joined     200 {"tokens"}: all computed
        │                                     │   hung up: given up    an error: it is not, or not
        └──── the turn, decode_from, nonce ─> D: Prefill(leg = nonce)  all of it
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive

from ownerserve.engines.hf.build import HfWorker
from ownerserve.engines.hf.http.answering import (
    STATUS_OF_REASON,
    ApiError,
    json_response,
    load_headers,
    while_connected,
)
from ownerserve.engines.hf.scheduling.requests import EngineRequest
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Accepted, Prefill, Reject
from ownerserve.node.transfers.legs import GatewayLegs

NOT_COMPUTED = "not_computed"
"""The code of a leg that was given up before its prompt was computed."""


async def answer_leg(worker: HfWorker, request: EngineRequest, receive: Receive) -> Response:
    """Compute the request's prompt for who asks under its leg's number, and answer once that is
    done; a gateway that hangs up gives it up. Raises ApiError where it is not computed."""
    legs = None if worker.transfers is None else worker.transfers.legs
    if legs is None:
        message = "this worker lends nothing, so it computes prompts for nobody"
        raise ApiError(409, message, code=NOT_COMPUTED, param=None)
    session = request.session_id
    asked = Prefill(
        pack(request.prompt),
        request.cache_salt,
        None if session is None else SessionId(session),
        request.bring_from,
        leg=request.leg,
    )
    accepted, tokens = await while_connected(receive, _computed(legs, asked))
    if tokens < accepted.tokens:
        message = f"{tokens} of {accepted.tokens} tokens were computed before it was given up"
        raise ApiError(409, message, code=NOT_COMPUTED, param=None)
    return json_response(
        {"object": "prefill", "tokens": tokens}, headers=load_headers(worker.engine.latest)
    )


async def _computed(legs: GatewayLegs, asked: Prefill) -> tuple[Accepted, int]:
    """Return what was promised and how much of it is computed, once nothing is added. Raises
    ApiError where it is refused."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[int] = loop.create_future()

    def told(tokens: int) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(lambda: None if over.done() else over.set_result(tokens))

    is_over = False
    try:
        answer = await asyncio.wrap_future(legs.begin(asked, told))
        if isinstance(answer, Reject):
            raise _refused(answer.reason)
        assert isinstance(answer, Accepted)
        tokens = await over
        is_over = True
        return answer, tokens
    finally:
        if not is_over:  # nobody waits: behind what was begun, if it was
            legs.end(asked.leg)


def _refused(reason: WorkerRefusal) -> ApiError:
    message = "the prompt is not computed here: the worker that answers computes it"
    return ApiError(STATUS_OF_REASON.get(reason, 400), message, code=reason.value, param=None)
