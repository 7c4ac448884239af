"""A stream whose turn moves to another worker is joined by the gateway: wherever the first one's
bytes are cut as it is asked to leave, its client reads all events once, and never the word that is
for the gateway. What is no such end is no move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.exchange.exchange import Exchange
from ownerserve.gateway.exchange.leaving import leave, leaving_from
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    TURN_HEADER,
    AnswerLine,
    decode_turn_line,
    encode_answer_line,
)
from ownerserve.router.worker import Worker
from tests.support.gateway.world import Client, World, header
from tests.support.waits import until_async

STREAM = b'{"model": "m", "stream": true, "prompt": "p"}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MARK, DONE = b": moved 3\n\n", b"data: [DONE]\n\n"


def said(*words: str) -> bytes:
    return b"".join(
        b"data: %b\n\n" % json.dumps({"id": "x", "choices": [{"index": 0, "text": word}]}).encode()
        for word in words
    )


def framed(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events)


FIRST = [said("one "), said("two "), said("three ")]
REST = [said("four "), said("five")]
END = b"0\r\n\r\n"


class Leg:
    """A worker that answers one leg with `before`, and with `after` once it may go on. The leg of a
    turn that goes on it answers with `goes_on`, or nothing."""

    def __init__(self, life: int) -> None:
        self.before = self.after = b""
        self.goes_on: bytes | None = None
        self.sent, self.go = asyncio.Event(), asyncio.Event()
        self.legs: list[tuple[bytes, bytes]] = []
        """(head, body) of the turns that came."""
        self._unit = RoutingUnit(WorkerId(f"w{life}"), 0, Incarnation(life))
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> Address:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(header(head, b"content-length") or 0))
                if not head.startswith(b"POST /v1/completions"):
                    line = encode_answer_line(AnswerLine(unit=self._unit))
                    told = (ANSWER_HEADER.encode(), line)
                    writer.write(b"HTTP/1.1 200 OK\r\n%b: %b\r\ncontent-length: 2\r\n\r\n{}" % told)
                    continue
                self.legs.append((head, body))
                await self._answer(writer, head)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, head: bytes) -> None:
        line = decode_turn_line((header(head, TURN_HEADER.encode()) or b"{}").decode())
        if line.joins is not None:
            if self.goes_on is None:
                raise ConnectionError
            writer.write(self.goes_on)
            return
        writer.write(HEAD + self.before)
        self.sent.set()
        await self.go.wait()
        if not self.after:
            writer.transport.abort()
        writer.write(self.after)


class Fleet(World):
    """Two such workers, and a stream at one of them (`here`)."""

    def __init__(self, legs: list[Leg], gateway: Gateway) -> None:
        super().__init__([], gateway)
        self.both = legs
        self.here, self.there = legs

    async def begin(self, version: bytes = b"1.1") -> Client:
        client = await self.client()
        head = b"POST /v1/completions HTTP/%b\r\nHost: t\r\ncontent-length: %d\r\n\r\n"
        client.writer.write(head % (version, len(STREAM)) + STREAM)
        sent = [asyncio.create_task(one.sent.wait()) for one in self.both]
        await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
        self.here, self.there = sorted(self.both, key=lambda one: not one.sent.is_set())
        for one in sent:
            one.cancel()
        return client

    @property
    def exchange(self) -> Exchange:
        (found,) = [
            client.answering
            for client in self.gateway.clients
            if isinstance(client.answering, Exchange)
        ]
        return found

    def running(self) -> Worker | None:
        """Where the stream runs, once the gateway has its head."""
        for worker in self.gateway.state.fleet:
            if leaving_from(self.exchange, worker) is not None:
                return worker
        return None

    async def ask_to_leave(self) -> bool:
        await until_async(self.running, what="the stream to begin")
        await asyncio.sleep(0.005)  # what was sent behind the head comes, or some of it
        (target,) = [one for one in self.gateway.state.fleet if one is not self.running()]
        assert target.unit is not None
        return leave(self.exchange, target.unit) is not None

    def legs(self, outcome: str) -> int:
        return self.gateway.legs.counts["move", outcome]


async def fleet(before: bytes, after: bytes, goes_on: bytes | None) -> Fleet:
    legs = [Leg(1), Leg(2)]
    for one in legs:
        one.before, one.after, one.goes_on = before, after, goes_on
    addresses = tuple([await one.start() for one in legs])
    config = Config(workers=addresses, receipts=ReceiptForm.OPEN, health_interval_s=60.0)
    made = Fleet(legs, Gateway(config))
    await made.gateway.start()
    return made


async def close(made: Fleet) -> None:
    await made.settled()
    await made.close()
    for one in made.both:
        one.close()


def payload(body: bytes) -> Iterator[bytes]:
    """What is in the chunks of a body that may end short."""
    while body and not body.startswith(END):
        size, _, rest = body.partition(b"\r\n")
        yield rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


def events(text: bytes) -> list[bytes]:
    return [one for one in text.split(b"\n\n") if one and not one.startswith(b":")]


WHOLE = framed(*FIRST, MARK) + END


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_reads_each_event_once_wherever_the_first_leg_was_cut(version: bytes) -> None:
    async def one(cut: int) -> None:
        goes_on = HEAD + framed(*REST, DONE) + END
        made = await fleet(WHOLE[:cut], WHOLE[cut:], goes_on)
        client = await made.begin(version)
        left = await made.ask_to_leave()
        assert left, "no line was torn"
        made.here.go.set()
        head = await client.reader.readuntil(b"\r\n\r\n")
        body = await (client.chunks() if version == b"1.1" else client.reader.read())
        assert events(body) == events(b"".join([*FIRST, *REST, DONE])), (cut, body)
        assert b"moved 3" not in body and b"x-ownerserve-reason: moved" in body
        assert b"200 OK" in head
        (leg,) = made.there.legs
        assert leg[1] == b"" and header(leg[0], b"content-length") == b"0"
        assert header(leg[0], b"x-request-id") == header(made.here.legs[0][0], b"x-request-id")
        assert (made.legs("joined"), made.legs("lost")) == (1, 0)
        await close(made)

    async def main() -> None:
        before = len(framed(*FIRST))  # the word comes after the turn was asked to leave
        for cut in (*range(len(framed(FIRST[0])), before, 9), before, before + 4):
            await one(cut)

    asyncio.run(main())


LOST: dict[str, bytes | None] = {
    "is gone": None,
    "does not have it": b"HTTP/1.1 409 No\r\nx-ownerserve-refusal: unknown_turn\r\n"
    b"content-length: 2\r\n\r\n{}",
    "answers otherwise": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("target", LOST)
def test_a_client_hears_that_nobody_goes_on_where_the_target(target: str) -> None:
    """It is not asked anew: nobody could say where to go on from."""

    async def main() -> None:
        made = await fleet(framed(*FIRST), framed(MARK) + END, LOST[target])
        client = await made.begin()
        assert await made.ask_to_leave()
        made.here.go.set()
        await client.reader.readuntil(b"\r\n\r\n")
        body = await client.reader.read()
        assert not body.endswith(END), "it must not look whole"
        *before, last = events(b"".join(payload(body)))
        assert before == events(b"".join(FIRST))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
        assert made.legs("lost") >= 1 and made.legs("joined") == 0
        assert len(made.here.legs) == 1
        await close(made)

    asyncio.run(main())


def test_a_leg_that_is_whole_or_breaks_is_no_move() -> None:
    async def main() -> None:
        made = await fleet(framed(*FIRST), framed(*REST, DONE) + END, None)
        client = await made.begin()
        assert await made.ask_to_leave()
        made.here.go.set()
        await client.reader.readuntil(b"\r\n\r\n")
        assert events(await client.chunks()) == events(b"".join([*FIRST, *REST, DONE]))
        assert not made.there.legs and made.legs("begun") == 0
        await close(made)

        made = await fleet(framed(*FIRST), b"", None)
        client = await made.begin()
        assert await made.ask_to_leave()
        made.here.go.set()
        await client.reader.readuntil(b"\r\n\r\n")
        *before, last = events(b"".join(payload(await client.reader.read())))
        assert before == events(b"".join(FIRST)) and b"worker_lost" in last
        assert made.legs("source_lost") == 1 and not made.there.legs
        await close(made)

    asyncio.run(main())


def test_who_was_not_asked_to_leave_says_nothing_to_the_gateway() -> None:
    """The word of a worker that nobody asked is a comment, as any."""

    async def main() -> None:
        made = await fleet(framed(*FIRST), framed(MARK, *REST, DONE) + END, None)
        client = await made.begin()
        made.here.go.set()
        await client.reader.readuntil(b"\r\n\r\n")
        assert events(await client.chunks()) == events(b"".join([*FIRST, *REST, DONE]))
        assert not made.there.legs
        await close(made)

    asyncio.run(main())
