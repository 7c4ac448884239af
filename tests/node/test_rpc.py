"""The node's RPC port under a busy engine: what overtakes, what waits, what is said twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
import zmq

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    MAX_FRAME_BYTES,
    Cancel,
    Cancelled,
    Commit,
    Committed,
    Nonce,
    Reject,
    Release,
    Released,
    Reserve,
    Reserved,
    RpcAnswer,
    RpcRequest,
    Seed,
    Status,
    StatusIs,
    decode_answer,
    encode,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.rpc.server import REMEMBERED, Flights, RpcServer

PLACE = Reserve(TurnId("t"), Seed(100))
SOON_S = 60.0
HUGE = WorkerLoad(
    RoutingUnit(WorkerId("w" * MAX_FRAME_BYTES), 0, Incarnation(1)), 1.0, 0, 0, 0, 1, 2
)


class BusyEngine:
    """Takes requests as an engine in a long step does: nothing is looked at until `step`."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[tuple[RpcRequest, Future[RpcAnswer]]] = SimpleQueue()
        self.done: list[RpcRequest] = []
        self.numbers = 0

    def call(self, request: RpcRequest) -> Future[RpcAnswer]:
        answer: Future[RpcAnswer] = Future()
        self.inbox.put((request, answer))
        return answer

    def step(self) -> None:
        """Do what waits, but for what was called off."""
        while not self.inbox.empty():
            request, answer = self.inbox.get()
            if answer.set_running_or_notify_cancel():
                self.done.append(request)
                answer.set_result(self.answer(request))

    def answer(self, request: RpcRequest) -> RpcAnswer:
        match request:
            case Status():
                return StatusIs(HUGE)
            case Reserve():
                self.numbers += 1
                return Reserved(self.numbers)
            case Commit():
                return Committed()
        return Released()


class Line:
    """A client's one connection: requests by number, answers as they come."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def say(self, number: int, request: RpcRequest | Cancel, *, nonce: int = 0) -> None:
        self.socket.send_multipart([number.to_bytes(8, "big"), encode(request, nonce)])

    def hears(self, within_s: float = SOON_S) -> tuple[int, RpcAnswer | Cancelled]:
        assert self.socket.poll(int(within_s * 1000)), "no answer"
        number, data = self.socket.recv_multipart()
        return int.from_bytes(number, "big"), decode_answer(data)


@pytest.fixture
def engine() -> BusyEngine:
    return BusyEngine()


@pytest.fixture
def server(engine: BusyEngine) -> Iterator[RpcServer]:
    server = RpcServer()
    server.start(engine.call)
    yield server
    server.stop()


@pytest.fixture
def line(server: RpcServer) -> Iterator[Line]:
    line = Line(server.address)
    yield line
    line.socket.close()


def test_a_place_that_is_not_wanted_any_more_is_never_taken(engine: BusyEngine, line: Line) -> None:
    """The abort behind a slow request: it overtakes it."""
    line.say(1, PLACE, nonce=77)
    line.say(2, Cancel(77))
    assert line.hears() == (2, Cancelled()), "while the engine is in its step"
    engine.step()
    assert engine.done == []
    line.say(3, Commit(1))
    while not engine.done:
        engine.step()
    assert line.hears() == (3, Committed()), "and nothing was said of the place"


def test_a_place_that_was_taken_is_given_back_when_it_is_cancelled(
    engine: BusyEngine, line: Line
) -> None:
    """The answer and the word that nobody wants it cross."""
    line.say(1, PLACE, nonce=77)
    while not engine.done:
        engine.step()
    assert line.hears() == (1, Reserved(1))
    line.say(2, Cancel(77))
    assert line.hears() == (2, Cancelled())
    engine.step()
    assert engine.done == [PLACE, Release(1)]
    line.say(3, Cancel(77))
    assert line.hears() == (3, Cancelled())
    engine.step()
    assert engine.done == [PLACE, Release(1)], "once"


def test_what_is_cancelled_before_it_comes_is_not_begun(engine: BusyEngine, line: Line) -> None:
    line.say(1, Cancel(77))
    assert line.hears() == (1, Cancelled())
    line.say(2, PLACE, nonce=77)
    assert line.hears() == (2, Cancelled())
    assert engine.inbox.empty()


def test_a_repeated_request_is_done_once_and_has_one_answer(
    engine: BusyEngine, server: RpcServer, line: Line
) -> None:
    other = Line(server.address)  # the connection was lost, and made anew
    line.say(1, PLACE, nonce=77)
    line.say(2, PLACE, nonce=77)
    while engine.inbox.empty():
        time.sleep(0.001)
    other.say(3, Release(9))
    while engine.inbox.qsize() < 2:
        time.sleep(0.001)
    engine.step()
    assert other.hears() == (3, Released())
    assert line.hears() == (2, Reserved(1)), "to who asked last"
    other.say(4, PLACE, nonce=77)
    assert other.hears() == (4, Reserved(1))
    assert engine.done == [PLACE, Release(9)]
    other.say(5, PLACE, nonce=78)
    while not engine.inbox.qsize():
        time.sleep(0.001)
    engine.step()
    assert other.hears() == (5, Reserved(2)), "another wish"
    other.socket.close()


@pytest.mark.parametrize("word", [Release(1), Commit(1)])
def test_a_word_is_carried_out_however_long_the_step_before_it_takes(
    engine: BusyEngine, server: RpcServer, line: Line, word: RpcRequest
) -> None:
    """A place that a release was sent for must not stay taken: nobody says it again."""
    line.say(1, word)
    time.sleep(2.5)  # a step longer than any answer is waited for
    engine.step()
    assert engine.done == [word]
    number, answer = line.hears()
    assert (number, type(answer) is Reject) == (1, False)


def test_an_offer_is_not_waited_for_longer_than_it_is_good_for(
    engine: BusyEngine, server: RpcServer, line: Line
) -> None:
    line.say(1, PLACE, nonce=77)
    line.say(2, PLACE)
    told = {line.hears(), line.hears()}
    assert told == {(n, Reject(WorkerRefusal.ENGINE_BUSY)) for n in (1, 2)}
    engine.step()
    assert engine.done == []
    line.say(3, PLACE, nonce=77)
    assert line.hears() == (3, Reject(WorkerRefusal.ENGINE_BUSY)), "the same answer"


def test_a_frame_that_is_too_long_is_refused_and_the_connection_lives(
    engine: BusyEngine, server: RpcServer, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt of 262k tokens is not sent this way; whoever tries is told."""
    with pytest.raises(InvalidInput, match="at most 1048576"):
        encode(Reserve(TurnId("t" * MAX_FRAME_BYTES), Seed(1)))
    line.say(1, Release(1))
    line.socket.send_multipart([(2).to_bytes(8, "big"), b"x" * (2 * MAX_FRAME_BYTES)])
    assert line.hears() == (2, Reject(WorkerRefusal.MALFORMED))
    engine.step()
    assert line.hears() == (1, Released()), "what was in flight on it is answered still"
    assert "a frame of 2097152 bytes, at most 1048576" in caplog.text


def test_an_answer_that_is_too_long_is_a_refusal_and_the_port_lives(
    engine: BusyEngine, server: RpcServer, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.say(1, Status())
    while engine.inbox.empty():
        time.sleep(0.001)
    engine.step()
    assert line.hears() == (1, Reject(WorkerRefusal.MALFORMED))
    line.say(2, Release(1))
    while engine.inbox.empty():
        time.sleep(0.001)
    engine.step()
    assert line.hears() == (2, Released())
    assert "at most 1048576" in caplog.text


def test_answers_are_remembered_for_a_bounded_number_of_nonces() -> None:
    flights = Flights()
    for number in range(1, REMEMBERED + 2):
        flights.tell(Nonce(number), Reserved(number))
    assert flights.again(Nonce(1), []) is None, "the oldest is forgotten"
    assert flights.again(Nonce(REMEMBERED + 1), []) == Reserved(REMEMBERED + 1)
