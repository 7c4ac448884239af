"""The front asks the relays what their admin ports would say, and they answer: a question goes by
mail, with a socket for the answer.

    front ── AdminQuestion, socket ──> mailbox ──> relay: calls its own admin app, as a server would
          <── head line, body ───────────────────────┘

Nobody else can ask so: there is no port and no path.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp

from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.processes.journal import AdminQuestion
from ownerserve.gateway.processes.mail import Parcel, ParcelKind, Post

log = logging.getLogger("ownerserve.gateway")

PATIENCE_S = 5.0
PIECE_BYTES = 1 << 18


class AnswerHead(msgspec.Struct, frozen=True):
    """A head is what an answer says beside its body."""

    status: int
    media_type: str


class RelayAnswer(msgspec.Struct, frozen=True):
    """An answer is a relay's; `process`: whose."""

    process: int
    head: AnswerHead
    body: bytes

    @property
    def is_good(self) -> bool:
        """Whether it was no error."""
        return self.head.status < 400


async def ask(post: Post, process: int, question: AdminQuestion) -> RelayAnswer | None:
    """Ask one relay; None when it is away, or does not answer in time."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    with here:
        with there:
            try:
                data = msgspec.json.encode(question)
                post.send(process, Parcel(ParcelKind.QUESTION, there.fileno(), data))
            except Rejected:
                return None
        here.settimeout(0)
        said = bytearray()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(PATIENCE_S):
                while piece := await loop.sock_recv(here, PIECE_BYTES):
                    said += piece
                head, _, body = bytes(said).partition(b"\n")
                if head:
                    return RelayAnswer(process, msgspec.json.decode(head, type=AnswerHead), body)
    return None


async def answer(app: ASGIApp, parcel: Parcel) -> None:
    """Answer a question that came by mail, and close its socket."""
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=parcel.descriptor) as asker:
        asker.settimeout(0)
        try:
            head, body = await called(app, msgspec.json.decode(parcel.data, type=AdminQuestion))
            await loop.sock_sendall(asker, msgspec.json.encode(head) + b"\n" + body)
        except OSError as error:  # nobody waits for it any more
            log.debug("an answer to the front is not heard: %s", error)
        except Exception:  # a task's root
            log.exception("a question of the front's ended in a fault")


async def called(app: ASGIApp, question: AdminQuestion) -> tuple[AnswerHead, bytes]:
    """Call an app as a server does, and return what it says."""
    path, _, query = question.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": question.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in question.headers],
        "client": None,
        "server": None,
    }
    waiting = [{"type": "http.request", "body": question.body, "more_body": False}]
    heads, body = list[AnswerHead](), bytearray()

    async def receive() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            said = dict(message.get("headers", ()))
            heads.append(
                AnswerHead(message["status"], said.get(b"content-type", b"").decode("latin-1"))
            )
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    return heads[0], bytes(body)
