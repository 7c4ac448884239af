"""The two parsers without sockets: every split of the bytes gives the same requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.terms import TermFile
from ownerserve.gateway import service
from ownerserve.gateway.config import Config
from ownerserve.gateway.exchange.legs import Legs
from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.http.client import ClientConnection, HttpRequest
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.known_heads import head_bytes
from ownerserve.gateway.http.upstream import UpstreamConnection, WorkerPool
from ownerserve.gateway.rollout.reloading import ReadSettings, Reloading
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.tenants import read_tenants
from ownerserve.gateway.turns import Turns
from ownerserve.kv.clock import ManualClock
from ownerserve.router.messages import Failure

CAPS = {"head_max_bytes": 2048, "body_max_bytes": 4096}


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.sent += b"".join(parts)

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Recorder:
    """Stands where Exchange does: keeps each request; answers when told to."""

    kept: ClassVar[list[Recorder]] = []

    def __init__(
        self,
        turns: Turns,
        legs: Legs,
        client: ClientConnection,
        *,
        request: HttpRequest,
        request_id: bytes,
    ) -> None:
        self.request = request
        self.client = client
        self.aborted = False

    def start(self) -> None:
        Recorder.kept.append(self)

    def abort(self) -> None:
        self.aborted = True

    def answer(self) -> None:
        self.client.write(b"answer;")
        self.client.answer_complete()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    monkeypatch.setattr(service, "Exchange", Recorder)
    Recorder.kept = []
    yield Recorder.kept


def feed(*pieces: bytes) -> Wire:
    """A client connection that receives `pieces`; each request is answered at once."""

    async def run() -> Wire:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),), **CAPS))
        return await connect(gateway, pieces)

    return asyncio.run(run())


async def connect(gateway: Gateway, pieces: Sequence[bytes]) -> Wire:
    """The wire of one connection to `gateway`, closed behind the last of `pieces`."""
    connection, wire = ClientConnection(gateway), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    answered = 0
    for piece in pieces:
        connection.data_received(piece)
        while answered < len(Recorder.kept):
            Recorder.kept[answered].answer()
            answered += 1
            await asyncio.sleep(0)
    connection.connection_lost(None)
    return wire


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\nX-A: 1\r\n\r\n"
    + b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrail: er\r\n\r\n"
)
PLAIN = HEAD + b"Content-Length: 5\r\nX-A: 1\r\n\r\nabcde"
PIPELINED = PLAIN + CHUNKED + b"GET /v1/responses/r HTTP/1.1\r\nHost: h\r\n\r\n"


def splits(raw: bytes) -> list[Sequence[bytes]]:
    """`raw` in two, everywhere; and a byte at a time."""
    in_two = [(raw[:at], raw[at:]) for at in range(1, len(raw))]
    return [*in_two, [raw[at : at + 1] for at in range(len(raw))]]


def shape(kept: list[Recorder]) -> list[tuple[bytes, bytes, bytes]]:
    return [(one.request.head.method, one.request.head.lines, one.request.body) for one in kept]


@pytest.mark.parametrize("raw", [PLAIN, CHUNKED, PIPELINED], ids=["plain", "chunked", "pipelined"])
def test_every_split_gives_the_same_requests(raw: bytes, requests: list[Recorder]) -> None:
    feed(raw)
    whole = shape(requests)
    assert whole[0] == (b"POST", b"Host: h\r\nX-A: 1\r\n", b"abcde")
    assert len(whole) == (3 if raw is PIPELINED else 1)

    async def all_splits() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),), **CAPS))
        for pieces in splits(raw):
            requests.clear()
            await connect(gateway, pieces)
            assert shape(requests) == whole, pieces

    asyncio.run(all_splits())


def test_a_known_head_may_have_another_length_and_nothing_else(requests: list[Recorder]) -> None:
    head = HEAD + b"content-length: %d\r\nx-session-id: s\r\n\r\n"

    async def run() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),), **CAPS))
        known = gateway.limits.known
        for body in (b"abcde", b"", b"a" * 100, b"abc"):
            raw = head % len(body) + body
            found = head_bytes(raw)
            assert found is not None and found[1:] == (len(body), len(raw) - len(body))
            assert (known.get(found[0]) is None) is (body == b"abcde")
            for pieces in ((raw,), (raw[:-2], raw[-2:]), (raw + raw,)):
                requests.clear()
                wire = await connect(gateway, pieces)
                one = (b"POST", b"Host: h\r\n", body)
                assert shape(requests) == [one] * (len(b"".join(pieces)) // len(raw))
                assert wire.sent == b"answer;" * len(requests)
        assert (await connect(gateway, (head % 5000,))).sent.startswith(b"HTTP/1.1 413 ")
        for changed in (b"Expect: 100-continue", b"Connection: close", b"Content-Length: 3"):
            raw = HEAD + changed + b"\r\ncontent-length: 3\r\n\r\nabc"
            await connect(gateway, (raw,))
            found = head_bytes(raw)
            assert found is not None and known.get(found[0]) is None, changed

    asyncio.run(run())


def test_a_known_heads_refusal_has_no_former_requests_id(requests: list[Recorder]) -> None:
    head = HEAD + b"content-length: %d\r\n\r\n"
    named = HEAD + b"x-request-id: the-first\r\ncontent-length: 3\r\n\r\nabc"

    async def run() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),), **CAPS))
        await connect(gateway, (head % 3 + b"abc",))
        wire = await connect(gateway, (named, head % 5000))
        assert b"HTTP/1.1 413 " in wire.sent
        assert b"the-first" not in wire.sent

    asyncio.run(run())


def test_a_known_head_lets_nobody_in_whose_key_is_gone(
    tmp_path: Path, requests: list[Recorder]
) -> None:
    path = tmp_path / "tenants.toml"
    path.touch(0o600)
    text = 'secret = "%s"\n[tenants.a]\nkeys = ["%s"]\n'
    first, second = "sk-first-0123456789", "sk-second-0123456789"
    raw = HEAD + b"authorization: Bearer %b\r\nContent-Length: 3\r\n\r\nabc"

    async def run() -> None:
        path.write_text(text % ("s" * 32, first))
        config = Config(workers=(Address("127.0.0.1", 1),), tenants=read_tenants(path))
        gateway = Gateway(config)
        for _ in range(2):
            await connect(gateway, (raw % first.encode(),))
            refused = await connect(gateway, (raw % second.encode(),))
            assert refused.sent.startswith(b"HTTP/1.1 401 ")
        assert len(requests) == 2
        path.write_text(text % ("s" * 32, second))
        read = ReadSettings(structs.replace(config, tenants=read_tenants(path)), "info", {})

        await Reloading(gateway, ReadSettings(config, "info", {}), lambda: read).reload()
        refused = await connect(gateway, (raw % first.encode(),))
        assert refused.sent.startswith(b"HTTP/1.1 401 ")

    asyncio.run(run())


def test_pipelined_requests_wait_their_turn_and_a_deep_queue_stops_reading(
    requests: list[Recorder],
) -> None:
    async def run() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),)))
        connection, wire = ClientConnection(gateway), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received(PLAIN * 6)
        assert (len(requests), wire.reading) == (1, False)
        for done in range(6):
            requests[done].answer()
            await asyncio.sleep(0)
        assert (len(requests), wire.reading) == (6, True)
        connection.data_received(PLAIN)
        connection.connection_lost(None)
        assert requests[6].aborted

    asyncio.run(run())


REFUSED = {
    "TE and CL": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "CL and TE": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "signed length": (HEAD + b"Content-Length: +3\r\n\r\nabc", 400),
    "gzip, chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "TE that is no TE": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "bad chunk size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", 400),
    "folded header": (HEAD + b"X: a\r\n b\r\n\r\n", 400),
    "space before colon": (HEAD + b"X : a\r\n\r\n", 400),
    "bare line feeds": (HEAD.replace(b"\r", b"") + b"\n", 400),
    "NUL": (HEAD + b"X: a\0b\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two sessions": (HEAD + b"x-session-id: a\r\nX-Session-Id: b\r\n\r\n", 400),
    "absolute form": (b"GET http://evil/v1/models HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "admin path": (b"POST /pause HTTP/1.1\r\nHost: h\r\n\r\n", 404),
    "dot segments": (b"POST /v1/../pause HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "encoded dots": (b"POST /v1/%2E%2e/pause HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "upgrade": (HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 400),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "long header": (HEAD + b"X: " + b"a" * 3000 + b"\r\n\r\n", 431),
    "many headers": (HEAD + b"".join(b"X-%d: 1\r\n" % n for n in range(400)) + b"\r\n", 431),
    "long body": (HEAD + b"Content-Length: 5000\r\n\r\n", 413),
    "long chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1400\r\n" + b"a" * 5120, 413),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_two_readers_could_read_differently_is_refused(
    case: str, requests: list[Recorder]
) -> None:
    raw, status = REFUSED[case]
    for pieces in ((raw,), tuple(raw[at : at + 1] for at in range(len(raw)))):
        requests.clear()
        wire = feed(*pieces)
        assert wire.sent.startswith(b"HTTP/1.1 %d " % status), wire.sent
        assert b"connection: close\r\n" in wire.sent
        assert wire.closed
        assert not requests


def test_a_header_without_an_end_is_refused_before_it_ends(requests: list[Recorder]) -> None:
    wire = feed(HEAD + b"X: ", *([b"a" * 100] * 40))
    assert wire.sent.startswith(b"HTTP/1.1 431 ")


def test_a_refusal_waits_behind_the_answer_before_it(requests: list[Recorder]) -> None:
    wire = feed(PLAIN + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" + PLAIN)
    assert wire.sent.startswith(b"answer;HTTP/1.1 404 ")
    assert len(requests) == 1


def test_a_client_that_asks_is_told_to_continue(requests: list[Recorder]) -> None:
    wire = feed(HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n", b"abc")
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\nanswer;"
    assert b"xpect" not in requests[0].request.head.lines


def test_a_client_that_hangs_up_before_its_owner_is_looked_up_leaves_nothing_behind() -> None:
    async def run() -> None:
        directory = EmbeddedDirectory(ManualClock(), TermFile())
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),)), directory)
        connection = ClientConnection(gateway)
        connection.connection_made(Wire())  # type: ignore[arg-type]
        body = b'{"session_id": "s", "prompt": "p"}'
        connection.data_received(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert gateway.state.live == 0 and gateway.state.account.received == 0
        await gateway.stop()

    asyncio.run(run())


# Answers


class Sink:
    """Keeps what an upstream connection reports."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.data = b""
        self.end: object = None
        self.tail = b""

    def answer_begin(self, head: ResponseHead, first: bytes) -> Sink:
        self.head, self.data = head, first
        return self

    def answer_bytes(self, data: bytes) -> None:
        self.data += data

    def answer_end(self, tail: bytes) -> None:
        self.end, self.tail = "end", tail

    def answer_failed(self, failure: Failure) -> None:
        self.end = failure

    def answer_broken(self, failure: object) -> None:
        self.end = "broken"

    def answer_fault(self, error: Exception) -> None:
        self.end = error


def receive(*pieces: bytes, method: bytes = b"POST", lost: bool = False) -> tuple[Sink, WorkerPool]:
    pool = WorkerPool(Address("127.0.0.1", 1), open_access(None, None), connect_timeout_s=1)
    connection, sink = UpstreamConnection(pool), Sink()
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.send(b"", (), method=method, sink=sink, patience_s=60.0)
    for piece in pieces:
        connection.data_received(piece)
    if lost:
        connection.connection_lost(None)
    return sink, pool


OK = b"HTTP/1.1 200 OK\r\nServer: e\r\n"
EVENTS = b"".join(b"7\r\ndata: %d\r\n" % number for number in range(3)) + b"0\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, bytes, bytes]] = {
    "length": (OK + b"Content-Length: 5\r\n\r\nabcde", b"abcde", b"abcde"),
    "chunked": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + EVENTS,
        EVENTS,
        b"data: 0data: 1data: 2",
    ),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", b"", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\nServer: e\r\n\r\n", b"", b""),
    "after 100": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nab",
        b"ab",
        b"ab",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_every_split_gives_the_same_answer(case: str) -> None:
    raw, body, tail = ANSWERS[case]
    for pieces in [(raw,), *splits(raw)]:
        sink, pool = receive(*pieces)
        assert sink.head is not None
        assert (sink.data, sink.end, sink.tail) == (body, "end", tail), pieces
        assert sink.head.lines == b"Server: e\r\n"
        assert pool.idle == 1


@given(st.lists(st.integers(0, 60), max_size=12))
def test_chunks_that_pass_the_parser_by_and_others_give_one_answer(cuts: list[int]) -> None:
    frames = (
        b"2\r\n\r\n\r\n",  # its payload is a line end
        b"10\r\ndata: 0123456789\r\n",
        b"010\r\ndata: 0123456789\r\n",
        b"C\r\ndata: ABCDEF\r\n",
        b"c;a=b\r\ndata: abcdef\r\n",
        b"7\r\n\r\n0\r\n\r\n\r\n",
        b"0\r\n\r\n",
    )
    chunks = b"".join(frames)
    payload = (
        b"\r\n" + 2 * b"data: 0123456789" + b"data: ABCDEF" + b"data: abcdef" + b"\r\n0\r\n\r\n"
    )
    at = sorted({0, len(chunks), *(min(cut * 2, len(chunks)) for cut in cuts)})
    pieces = [chunks[begin:end] for begin, end in pairwise(at)]
    for parts in (pieces, frames):
        sink, pool = receive(OK + b"Transfer-Encoding: chunked\r\n\r\n", *parts)
        assert (sink.data, sink.end, sink.tail, pool.idle) == (chunks, "end", payload, 1), parts


@pytest.mark.parametrize("chunk", [b"4\r\nabc\r\n", b"3\r\nabcd\r\n", b" 3\r\nabc\r\n"])
def test_a_chunk_whose_size_is_wrong_is_the_parsers(chunk: bytes) -> None:
    whole = b"3\r\nabc\r\n"
    sink, _ = receive(OK + b"Transfer-Encoding: chunked\r\n\r\n", whole, chunk, whole)
    assert sink.end == "broken"
    assert sink.data in (whole, whole + chunk)


def test_an_answer_that_ends_by_close_and_one_to_head() -> None:
    sink, pool = receive(OK + b"\r\nabc", lost=True)
    assert (sink.data, sink.end, pool.idle) == (b"abc", "end", 0)
    sink, pool = receive(OK + b"Content-Length: 9\r\n\r\n", method=b"HEAD")
    assert (sink.data, sink.end, pool.idle) == (b"", "end", 0)


@pytest.mark.parametrize(
    ("raw", "end"),
    [
        (b"", Failure.CLOSED),
        (b"HTTP/1.1 200", Failure.CLOSED),
        (b"SSH-2.0-OpenSSH\r\n\r\n", Failure.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nX" + b"x" * 70_000, Failure.MALFORMED),
        (OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", Failure.MALFORMED),
        (OK + b"Content-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\n\r\n", Failure.MALFORMED),
        (OK + b"Content-Length: 5\r\n\r\nabc", "broken"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab", "broken"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", "broken"),
    ],
)
def test_answers_that_fail_are_never_taken_for_whole(raw: bytes, end: object) -> None:
    sink, pool = receive(raw, lost=True)
    assert (sink.end, pool.idle) == (end, 0)


def test_bytes_past_the_end_of_an_answer_are_not_passed_on() -> None:
    head, extra = OK + b"Content-Length: 5\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nsmuggled"
    sink, pool = receive(head + b"abc", b"de" + extra)
    assert (sink.data, sink.end, pool.idle) == (b"abc", "broken", 0)


def test_a_worker_that_speaks_out_of_turn_is_dropped() -> None:
    raw, _, _ = ANSWERS["length"]
    sink, _ = receive(raw, raw)
    assert (sink.data, sink.end) == (b"abcde", "end")
