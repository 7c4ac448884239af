"""W3C trace context and request ids: what a client brings, what its worker and the books get."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ownerserve.gateway.http.heads import fit_request_id
from ownerserve.gateway.http.trace_context import TraceContext, read_trace
from tests.support.gateway.world import World, header

Play = Callable[..., None]
CHAT = "/v1/chat/completions"
TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
GOOD = b"00-%b-%b-01" % (TRACE, SPAN)


def read(parent: bytes, state: bytes | None = None) -> TraceContext:
    headers = {b"traceparent": parent} | ({} if state is None else {b"tracestate": state})
    found = read_trace(headers)
    assert found is not None
    return found


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_a_context_goes_on_with_its_flags(flags: int) -> None:
    found = read(b"00-%b-%b-%02x" % (TRACE, SPAN, flags))
    assert found == TraceContext(TRACE.decode(), SPAN.decode(), flags)
    assert found.lines("1" * 16) == b"traceparent: 00-%b-%b-%02x\r\n" % (TRACE, b"1" * 16, flags)


@pytest.mark.parametrize(
    "later", [b"cc-%b-%b-01", b"cc-%b-%b-01-what-the-future", b"01-%b-%b-05", b"fe-%b-%b-01-"]
)
def test_a_later_version_is_read_as_far_as_it_is_known(later: bytes) -> None:
    found = read(later % (TRACE, SPAN))
    assert (found.trace_id, found.flags) == (TRACE.decode(), 1)
    assert found.lines("1" * 16).startswith(b"traceparent: 00-%b-1" % TRACE)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"x",
        b"00-%b-%b" % (TRACE, SPAN),
        b"00-%b-%b-1" % (TRACE, SPAN),
        b"00-%b-%b-01-more" % (TRACE, SPAN),
        b"00-%b-%b-01 " % (TRACE, SPAN),
        b"ff-%b-%b-01" % (TRACE, SPAN),
        b"cc-%b-%b-01.what" % (TRACE, SPAN),
        b"0-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-01" % (TRACE.upper(), SPAN),
        b"00-%b-%b-0X" % (TRACE, SPAN),
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"00-%b-%b-01" % (TRACE[:-1], SPAN),
        b"00-%b-%b-01" % (TRACE + b"0", SPAN),
        b"00_%b_%b_01" % (TRACE, SPAN),
        b"00-%b-%b-01\xff" % (TRACE, SPAN),
    ],
)
def test_a_malformed_parent_begins_a_trace_and_takes_no_state_along(wrong: bytes) -> None:
    found = read(wrong, b"vendor=1")
    assert re.fullmatch("(?!0{32})[0-9a-f]{32}", found.trace_id)
    assert (found.trace_id.encode() in wrong, found.parent_id, found.state) == (False, "", b"")


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        (b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (b" foo=1 ,\t bar=2,,", b"foo=1,bar=2"),
        (b"t@v=1,0/_-*=x y", b"t@v=1,0/_-*=x y"),
        (b"k" * 256 + b"=" + b"v" * 256, b"k" * 256 + b"=" + b"v" * 256),
        (b",".join(b"k%d=v" % n for n in range(32)), b",".join(b"k%d=v" % n for n in range(32))),
        (b"foo=1,foo=2", b""),
        (b"Foo=1", b""),
        (b"foo=", b""),
        (b"foo", b""),
        (b"foo=a=b", b""),
        (b"foo=\xff", b""),
        (b"k" * 257 + b"=v", b""),
        (b"k=" + b"v" * 257, b""),
        (b",".join(b"k%d=v" % n for n in range(33)), b""),
        (b"", b""),
    ],
)
def test_a_state_goes_on_whole_or_not_at_all_and_never_costs_the_parent(
    state: bytes, goes_on: bytes
) -> None:
    found = read(GOOD, state)
    assert (found.trace_id, found.state) == (TRACE.decode(), goes_on)
    assert (b"tracestate: %b\r\n" % goes_on in found.lines("1" * 16)) == bool(goes_on)


def test_who_brings_none_is_part_of_none() -> None:
    assert read_trace({}) is None
    assert read_trace({b"tracestate": b"vendor=1"}) is None


def test_a_turn_joins_its_worker_to_its_clients_trace(
    play: Play, entries: list[dict[str, object]]
) -> None:
    """The worker hears one parent, of this gateway; the answer, log and decisions have the ids."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        told = {"traceparent": GOOD.decode(), "tracestate": "a=1", "x-request-id": "mine.1"}
        answer = await client.post(CHAT, **told)
        head, _ = engine.seen[-1]
        parent = header(head, b"traceparent") or b""
        trace, span = parent.split(b"-")[1:3]
        assert (trace, parent[-3:]) == (TRACE, b"-01") and span != SPAN
        assert head.lower().count(b"\r\ntraceparent:") == 1
        assert header(head, b"tracestate") == b"a=1"
        assert header(head, b"x-request-id") == b"mine.1"
        assert answer["x-request-id"] == "mine.1"
        (turn,) = [one for one in entries if one["event"] == "turn"]
        assert (turn["request_id"], turn["trace_id"]) == ("mine.1", TRACE.decode())
        decided = world.gateway.turns.observer.decisions[-1]
        assert (decided.request_id, decided.trace_id) == (b"mine.1", TRACE.decode())

    play(scenario, engines=1, access_log=True)


def test_another_worker_is_told_of_the_same_trace(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        world.engines[0].drops_next = world.engines[1].drops_next = True
        await client.post(CHAT, traceparent=GOOD.decode())
        heads = [head for engine in world.engines for head, _ in engine.seen]
        traces = {(header(head, b"traceparent") or b"").split(b"-")[1] for head in heads}
        assert len(heads) > 1 and traces == {TRACE}

    play(scenario, engines=2)


@pytest.mark.parametrize(
    "lines", ["traceparent: nonsense\r\n", f"traceparent: {GOOD.decode()}\r\n" * 2]
)
def test_a_malformed_or_doubled_parent_is_replaced_and_refuses_nobody(
    play: Play, lines: str
) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n{lines}\r\n{{}}"
        client.writer.write(head.encode())
        assert (await client.read()).status == 200
        sent, _ = engine.seen[-1]
        assert sent.lower().count(b"\r\ntraceparent:") == 1
        parent = (header(sent, b"traceparent") or b"").decode()
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]", parent)
        assert TRACE.decode() not in parent

    play(scenario, engines=1)


def test_a_state_in_several_lines_is_one_and_no_context_is_no_lines(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        lines = f"traceparent: {GOOD.decode()}\r\ntracestate: a=1\r\ntracestate: b=2\r\n"
        head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n{lines}\r\n{{}}"
        client.writer.write(head.encode())
        assert (await client.read()).status == 200
        assert header(engine.seen[-1][0], b"tracestate") == b"a=1,b=2"
        await client.post(CHAT)
        assert b"\r\ntrace" not in engine.seen[-1][0].lower()

    play(scenario, engines=1)


@pytest.mark.parametrize("given", [b"r1", b"a" * 128, b"0aZ-._:/+=@~", b"chatcmpl-1f"])
def test_a_fit_request_id_is_taken_over(given: bytes) -> None:
    assert fit_request_id(given) == given


@pytest.mark.parametrize(
    "given",
    [b"", b"a" * 129, b"two words", b"tab\t", b'"', b"\xe4", b"-a", b"a\x00", b"{}", b"a;b"],
)
def test_an_unfit_request_id_is_replaced(given: bytes) -> None:
    assert fit_request_id(given) is None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/v1/models", 200), ("/v1/none", 404), (CHAT + "?x#", 405)],
)
def test_every_answer_has_the_clients_id(play: Play, path: str, status: int) -> None:
    async def scenario(world: World) -> None:
        for given, comes_back in (("mine", True), ("not fit", False)):
            client = await world.client()
            head = f"GET {path} HTTP/1.1\r\nHost: t\r\nX-Request-ID: {given}\r\n\r\n"
            client.writer.write(head.encode())
            answer = await client.read()
            assert answer.status == status
            assert (answer["x-request-id"] == given) is comes_back
            assert answer["x-request-id"]

    play(scenario, engines=1)
