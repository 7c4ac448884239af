"""The front is the process that has the admin port of a gateway of several relays, and what there
is one of: the embedded directory.

It asks the relays and says what they say together (merging). What changes something is asked of
all of them, and goes into the journal for those that start again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ownerserve.gateway.admin import get_page, server_of
from ownerserve.gateway.admin_api.endpoints import Asked, fault_response
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.server_tls import ServerTls
from ownerserve.gateway.logs import tell
from ownerserve.gateway.processes.asked import RelayAnswer, ask
from ownerserve.gateway.processes.journal import RELOAD, AdminQuestion
from ownerserve.gateway.processes.layout import ProcessLayout
from ownerserve.gateway.processes.line import Line
from ownerserve.gateway.processes.mail import Post
from ownerserve.gateway.processes.merging import (
    NEWEST,
    TOGETHER,
    status,
    worker_row,
)
from ownerserve.gateway.processes.merging_metrics import Counted, read
from ownerserve.gateway.processes.relay import ABOUT
from ownerserve.gateway.processes.supervisor import Became, Ready
from ownerserve.gateway.service import TIDY_INTERVAL_S

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
BODY_BYTES_MAX = 1 << 20
_HEADERS = ("content-type", "origin")
_ALIAS = "/ownerserve"


async def run_front(
    config: Config, layout: ProcessLayout, became: Became, *, served_at: str | None
) -> None:
    """Serve the admin port until the supervisor says otherwise."""
    line = Line(became.line)
    listener = layout.keep_admin()
    tls = None if config.admin_tls is None else ServerTls(config.admin_tls)
    front = Front(layout)
    server = server_of(front.app(), config, tls)
    listener.listen()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    line.ready(Ready(directory=served_at))
    while not line.drain.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(TIDY_INTERVAL_S):
                await line.drain.wait()
        if line.reload.is_set():
            line.reload.clear()
            await front.change(AdminQuestion(method="POST", target=RELOAD))
        if tls is not None:
            tls.look()
    server.should_exit = True
    await serving


class Front:
    """The front of one gateway."""

    def __init__(self, layout: ProcessLayout) -> None:
        self._layout = layout
        self._post = Post(layout.mailboxes)
        self._counted = Counted()
        self._changing = asyncio.Lock()

    def app(self) -> Starlette:
        """Make the app of the admin port."""
        return Starlette(
            routes=[
                Route("/", _page),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._answer, methods=METHODS),
            ],
            exception_handlers={Exception: fault_response},
        )

    async def _answer(self, request: Request) -> Response:
        """Answer what relays answer: together, where it is asked for, or after all have done it."""
        body = await _body_of(request)
        if body is None:
            return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body: is too long")
        path, query = quote(request.scope["path"]), request.url.query
        question = AdminQuestion(
            method=request.method,
            target=f"{path}?{query}" if query else path,
            headers=[(name, request.headers[name]) for name in _HEADERS if name in request.headers],
            body=body,
        )
        if question.changes:
            return await self.change(question)
        said = await self._ask_all(question)
        if not said:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "no process answers")
        bad = next((one for one in said if not one.is_good), None)
        return _passed(said[0] if bad is None else bad, bad or await self._together(request, said))

    async def _together(self, request: Request, said: Sequence[RelayAnswer]) -> Any:
        """Return what the relays' good answers come to; the first one's where nobody knows how to
        put them together."""
        path = request.url.path.removeprefix(_ALIAS)
        values = [msgspec.json.decode(one.body) for one in said if _is_json(one)]
        if len(values) < len(said):
            return said[0]
        if path == "/status":
            return status(values, [msgspec.json.decode(one.body) for one in await self._abouts()])
        newest = NEWEST.get(path)
        if newest is not None:
            return newest(values, Asked(request).last)
        together = TOGETHER.get(path)
        return said[0] if together is None else together(values)

    async def change(self, question: AdminQuestion) -> Response:
        """Ask every relay to change something, also those that are away and start again."""
        journal = self._layout.journal
        async with self._changing:
            before = journal.entries()
            journal.add(question)
            said = await self._ask_all(question)
            good = [one for one in said if one.is_good]
            if said and not good:
                journal.set(before)
            elif good and question.path == RELOAD:
                journal.reloaded(question, msgspec.json.decode(good[0].body)["changed"])
        if not said:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "no process answers")
        bad = [one for one in said if not one.is_good]
        if good and bad:
            tell(
                logging.WARNING, "processes_differ", asked=f"{question.method} {question.target}",
                refused_by=",".join(str(one.process) for one in bad),
            )  # fmt: skip
        if bad:
            return _passed(bad[0], bad[0])
        return _passed(good[0], self._changed(question, good))

    @staticmethod
    def _changed(question: AdminQuestion, good: Sequence[RelayAnswer]) -> Any:
        """Return what the relays' words on a change come to."""
        rows = [msgspec.json.decode(one.body) for one in good if _is_json(one)]
        if len(rows) < len(good):
            return good[0]
        if question.path.startswith("/workers"):
            return worker_row(rows)
        together = TOGETHER.get(question.path)
        return good[0] if together is None else together(rows)

    async def _metrics(self, request: Request) -> Response:
        """Answer Prometheus. A relay that is away counts as it was last read."""
        exposed, abouts = await asyncio.gather(
            self._ask_all(AdminQuestion(method="GET", target="/metrics")), self._abouts()
        )
        lives = {one.process: msgspec.json.decode(one.body)["life"] for one in abouts}
        told = {
            one.process: (lives[one.process], read(one.body.decode()))
            for one in exposed
            if one.is_good and one.process in lives
        }
        return Response(self._counted.exposition(told), media_type=CONTENT_TYPE_LATEST)

    async def _abouts(self) -> list[RelayAnswer]:
        said = await self._ask_all(AdminQuestion(method="GET", target=ABOUT))
        return [one for one in said if one.is_good]

    async def _ask_all(self, question: AdminQuestion) -> list[RelayAnswer]:
        """Return the answers of those that answer, in order."""
        asking = (ask(self._post, process, question) for process in range(self._layout.processes))
        return [one for one in await asyncio.gather(*asking) if one is not None]


async def _page(request: Request) -> Response:
    return await get_page(Asked(request))


async def _body_of(request: Request) -> bytes | None:
    """Return a request's body; None when it is too long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            return None
    return body


def _is_json(answer: RelayAnswer) -> bool:
    return answer.head.media_type.startswith("application/json")


def _passed(answer: RelayAnswer, said: Any) -> Response:
    """Return an answer with its own words, or with what was put together."""
    body = said.body if isinstance(said, RelayAnswer) else msgspec.json.encode(said)
    return Response(body, answer.head.status, media_type=answer.head.media_type)


def _error(status_code: HTTPStatus, message: str) -> Response:
    body = msgspec.json.encode({"error": message})
    return Response(body, status_code, media_type="application/json")
