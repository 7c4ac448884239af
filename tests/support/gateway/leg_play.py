"""One exchange over workers, a client and timers that do what a test says, in any order: each step
is one that the gateway's sockets could report next. Its turns, legs and state are real."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from ownerserve.gateway.config import Config, PrefillLegs
from ownerserve.gateway.exchange.exchange import Exchange
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.http.bodies import BodyBudget
from ownerserve.gateway.http.client import ClientConnection, HttpRequest
from ownerserve.gateway.http.events import unframed
from ownerserve.gateway.http.heads import read_request_head, read_response_head
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.upstream import AnswerReader, BodySink, HeadSink, WorkerPool
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.workers.health import in_role
from ownerserve.gateway.workers.rpc import Places
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.router.messages import Failure, WorkerUp
from ownerserve.router.worker import Profile, WorkerRole

EVENTS = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]


def chunk_of(text: str, id: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}}
    return b"data: %b\n\n" % json.dumps({"id": id, "choices": [choice]}).encode()


class HandTimers(asyncio.SelectorEventLoop):
    """A loop whose timers run when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[Callable[[], object]] = []

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self.timers.append(lambda: callback(*args))
        return asyncio.TimerHandle(self.time() + delay, callback, args, self)


class HandUpstream:
    """A connection on which a worker sends what it is told to."""

    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self.reader = AnswerReader()
        self.sink: HeadSink | BodySink | None = None
        self.begun = False
        self.said = 0
        self.hung_up = False

    def send(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        *,
        method: bytes,
        sink: HeadSink,
        patience_s: float,
    ) -> None:
        assert self.sink is None
        assert not self.hung_up
        self.sink, self.body = sink, json.loads(b"".join(body))

    def abort(self) -> None:
        self.hung_up, self.sink = True, None

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    # What the worker does

    def answers(self, status: int) -> None:
        """A whole answer, which is no stream."""
        self._begins(status, [(b"content-length", b"2")], b"{}")

    def streams(self) -> None:
        """The head of a stream."""
        self._begins(200, EVENTS, b"")

    def _begins(self, status: int, headers: list[tuple[bytes, bytes]], first: bytes) -> None:
        sink = cast(HeadSink, self.sink)
        self.reader.begin(b"POST")
        raw = b"HTTP/1.1 %d X\r\n" % status
        raw += b"".join(b"%b: %b\r\n" % header for header in headers)
        self.reader.feed_head(raw + b"\r\n" + first)
        self.begun = True
        going_on = sink.answer_begin(read_response_head(status, b"X", headers), first)
        if self.sink is sink:
            self.sink = going_on
            if first:
                self._ends()

    def says(self, payload: bytes) -> None:
        self.sends(b"%x\r\n%b\r\n" % (len(payload), payload))

    def sends(self, data: bytes) -> None:
        """Bytes of the body, wherever they are cut."""
        if not data:
            return
        self.reader.feed_body(data)
        sink = cast(BodySink, self.sink)
        sink.answer_bytes(data)
        if self.reader.complete and self.sink is sink:
            self._ends()

    def says_word(self) -> None:
        """The next of the words that each worker says."""
        self.said += 1
        self.says(chunk_of(f"w{self.said} ", self.worker))

    def says_other(self) -> None:
        """What no other worker says."""
        self.says(chunk_of(f"of {self.worker} ", self.worker))

    def ends(self) -> None:
        """The body's end, of a stream."""
        self.sends(b"0\r\n\r\n")

    def _ends(self) -> None:
        sink, self.sink = cast(BodySink, self.sink), None
        sink.answer_end(self.reader.payload.tail)

    def fails(self) -> None:
        sink, self.sink = self.sink, None
        self.hung_up = True
        if self.begun:
            cast(BodySink, sink).answer_broken(Failure.CLOSED)
        else:
            cast(HeadSink, sink).answer_failed(Failure.CLOSED)


class HandPool:
    """A pool whose connections come when they are told to."""

    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self.address = Address("127.0.0.1", 1)
        self.opening: list[asyncio.Future[HandUpstream]] = []
        self.made: list[HandUpstream] = []

    def take(self) -> None:
        return None

    async def connect(self) -> HandUpstream:
        future = asyncio.get_running_loop().create_future()
        self.opening.append(future)
        return await future

    def close_idle(self) -> None: ...

    def opens(self) -> None:
        upstream = HandUpstream(self.worker)
        self.made.append(upstream)
        self.opening.pop(0).set_result(upstream)

    def refuses(self) -> None:
        self.opening.pop(0).set_exception(ConnectionRefusedError("nobody listens"))


class HandClient:
    """What a client is told."""

    connection_line = b""
    takes_more = True

    def __init__(self) -> None:
        self.written = b""
        self.ends: list[str] = []

    def write(self, data: bytes) -> None:
        assert not self.ends
        self.written += data

    def close_after_answer(self) -> None: ...

    def answer_complete(self) -> None:
        self.ends.append("complete")

    def answer_cut_off(self, last: bytes = b"") -> None:
        self.written += last
        self.ends.append("cut")

    def answer_rejected(self, rejected: Rejected, request_id: bytes) -> None:
        assert not self.written, "a part of an answer is followed by another one's head"
        self.ends.append(f"rejected {rejected.code}")


class NoPlaces:
    """Nobody's admission can be asked."""

    def can_ask(self, worker: WorkerId) -> bool:
        return False

    are_held = can_ask


class LegPlay:
    """One turn, step by step."""

    def __init__(
        self, body: dict[str, Any], *, roles: tuple[WorkerRole, ...] = (), **settings: Any
    ) -> None:
        """Of a gateway that asks both workers of a split turn at once, workers speak our protocol;
        their admission is asked nothing."""
        self.loop = HandTimers()
        self.body = body
        self.settings = settings
        self.roles = roles
        self.is_gone = False
        self.loop.run_until_complete(self._make())

    async def _make(self) -> None:
        addresses = tuple(Address("127.0.0.1", number + 1) for number in range(3))
        settings = {"policy": "least_load", **self.settings}
        self.gateway = Gateway(Config(workers=addresses, **settings))
        state, turns = self.gateway.state, self.gateway.turns
        self.pools = []
        for number, address in enumerate(addresses):
            pool = HandPool(address.worker)
            self.pools.append(pool)
            turns.pools[address.worker] = cast(WorkerPool, pool)
            profile = Profile()
            if self.roles:
                profile = in_role(profile, self.roles[number])
            life = Incarnation(number + 1)
            if settings.get("prefill_legs") is PrefillLegs.BOTH:
                profile = replace(profile, lends=frozenset({Tier.DEVICE}))
                turns.lines.learn(address.worker, "127.0.0.1", "tcp://127.0.0.1:9")
                turns.worker_names.up(RoutingUnit(address.worker, 0, life), f"w{number}")
                turns.places = cast(Places, NoPlaces())
            state.handle(WorkerUp(address.worker, 0, life, profile), 0.0)
        self.client = HandClient()
        body = json.dumps(self.body).encode()
        said = {b"host": b"t", b"content-type": b"application/json", b"x-session-id": b"s"}
        headers = list(said.items())
        head = read_request_head(b"POST", b"/v1/chat/completions", b"1.1", headers=headers)
        request = HttpRequest(head, body, True, BodyBudget(1 << 30).open())
        self.exchange = Exchange(
            turns, self.gateway.legs, cast(ClientConnection, self.client),
            request=request, request_id=b"r",
        )  # fmt: skip
        self.exchange.start()
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    @property
    def upstreams(self) -> list[HandUpstream]:
        """The connections that carry something of the turn now."""
        return [one for pool in self.pools for one in pool.made if one.sink is not None]

    def steps(self) -> dict[str, Callable[[], object]]:
        """What could come next, by name."""
        steps: dict[str, Callable[[], object]] = {}
        if not self.is_gone and not self.client.ends:
            steps["client gone"] = self._gone
        if self.loop.timers:
            steps["late"] = lambda: self.loop.timers.pop(0)()
        for number, pool in enumerate(self.pools):
            pool.opening = [one for one in pool.opening if not one.done()]
            if pool.opening:
                steps[f"w{number} opens"] = pool.opens
                steps[f"w{number} refuses"] = pool.refuses
        for one in self.upstreams:
            name = one.worker.rpartition(":")[2]
            steps[f"{name} fails"] = one.fails
            if one.begun:
                steps[f"{name} says"] = one.says_word
                steps[f"{name} says other"] = one.says_other
                steps[f"{name} ends"] = one.ends
            else:
                steps[f"{name} streams"] = one.streams
                for status in (200, 400, 503):
                    steps[f"{name} answers {status}"] = lambda one=one, s=status: one.answers(s)
        return steps

    def _gone(self) -> None:
        self.is_gone = True
        self.exchange.abort()

    def do(self, step: str) -> None:
        """Take a step, and look at the books."""

        async def act() -> None:
            self.steps()[step]()
            await self._settle()
            self.gateway.state.check()

        self.loop.run_until_complete(act())

    def close(self) -> None:
        """End the loop; what is open is the test's to have looked at."""
        self.loop.run_until_complete(self.gateway.stop())
        self.loop.close()

    def check_over(self) -> None:
        """The turn is over: nothing is held anywhere, and the client has one answer."""
        state = self.gateway.state
        assert state.live == 0, "a receipt was not given back"
        assert not self.upstreams, "a worker goes on for nobody"
        assert not any(one for pool in self.pools for one in pool.opening if not one.done())
        assert len(self.client.ends) == (0 if self.is_gone and not self.client.ends else 1)
        assert self.client.written.count(b"HTTP/1.1 ") <= 1
        if self.settings.get("carry_on"):
            self._check_text()
        account = state.account
        assert account.legs_begun == account.legs_ended

    def _check_text(self) -> None:
        """The client has the words of one stream in their order, under one id, each once."""
        body = unframed(self.client.written.partition(b"\r\n\r\n")[2])
        events = [json.loads(one[6:]) for one in body.split(b"\n\n") if one.startswith(b"data: {")]
        chunks = [event for event in events if "choices" in event]
        assert len({chunk["id"] for chunk in chunks}) <= 1
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        ours = re.sub(r"of \S+ ", "", text)
        words = [f"w{number + 1} " for number in range(ours.count(" "))]
        assert ours == "".join(words), text
        assert len(events) - len(chunks) <= 1
