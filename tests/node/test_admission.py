"""The worker's word: what is promised is held, what is refused says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import pytest
import zmq

from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.framed import FramedClient
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    NO_NONCE,
    Admit,
    Commit,
    Committed,
    Probe,
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
    decode_request,
    encode,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import (
    RESERVED_FOR_S,
    Admission,
    Levels,
    PlaceTaken,
    probe_seed,
)
from ownerserve.node.rpc.server import RpcClient, RpcServer
from tests.support.node.node_driver import B, NodeDriver

LEVELS = Levels(0, 2, 100, 50 * B, 40 * B)
SESSION = SessionId("s")


@pytest.fixture
def driver() -> NodeDriver:
    """Ten blocks of a session, at version 1."""
    driver = NodeDriver()
    driver.turn(range(10 * B + 1))
    return driver


@pytest.fixture
def admission(driver: NodeDriver) -> Admission:
    return Admission(driver.cache.sessions)


def test_a_quote_holds_nothing(admission: Admission) -> None:
    assert probe_seed(Seed(20), admission.standing(LEVELS, 0.0)) == Admit(100)
    assert admission.held(0.0) == 0


@pytest.mark.parametrize(
    ("wanted", "changes", "reason"),
    [
        (Seed(41 * B), {}, WorkerRefusal.TOO_LONG),
        (Seed(1), {"waiting": 2}, WorkerRefusal.QUEUE_FULL),
        (Seed(40 * B), {"room_tokens": 39 * B}, WorkerRefusal.NO_ROOM),
        (Seed(1), {"is_draining": True}, WorkerRefusal.DRAINING),
    ],
)
def test_a_refusal_says_why(
    admission: Admission, wanted: Seed, changes: dict[str, int], reason: WorkerRefusal
) -> None:
    levels = msgspec.structs.replace(LEVELS, **changes)
    assert probe_seed(wanted, admission.standing(levels, 0.0)) == Reject(reason)
    answer = admission.reserve(TurnId("t"), wanted, levels=levels, now=0.0)
    assert answer == Reject(reason)
    assert admission.counts[reason] == 1


def test_a_reservation_is_a_place_until_its_turn_arrives(admission: Admission) -> None:
    def reserve(name: str, now: float) -> Reserved | Reject:
        return admission.reserve(TurnId(name), Seed(B), levels=LEVELS, now=now)

    one, two = reserve("a", 0.0), reserve("b", 0.0)
    assert isinstance(one, Reserved) and isinstance(two, Reserved)
    assert reserve("c", 0.0) == Reject(WorkerRefusal.QUEUE_FULL)
    assert admission.commit(one.reservation, 5.0) == Committed()
    assert admission.commit(one.reservation, 6.0) == Committed()
    assert admission.release(two.reservation) == Released()
    assert admission.next_expiry_s() == 5.0 + RESERVED_FOR_S, "as it was committed first"
    assert isinstance(reserve("c", 6.0), Reserved)
    assert admission.arrived(one.reservation, 6.0) == PlaceTaken(TurnId("a"), tokens=B)
    gone = Reject(WorkerRefusal.UNKNOWN_RESERVATION)
    assert admission.arrived(one.reservation, 6.0) == gone, "a place is used once"
    assert admission.arrived(two.reservation, 6.0) == gone
    assert admission.held(6.0) == 1
    assert admission.counts[WorkerRefusal.UNKNOWN_RESERVATION] == 2


def test_a_place_that_nobody_takes_is_free_again(admission: Admission) -> None:
    held = admission.reserve(TurnId("a"), Seed(B), levels=LEVELS, now=0.0)
    assert isinstance(held, Reserved)
    late = RESERVED_FOR_S
    assert admission.commit(held.reservation, late) == Reject(WorkerRefusal.UNKNOWN_RESERVATION)
    assert admission.held(late) == 0


def test_places_count_against_the_room(admission: Admission) -> None:
    levels = msgspec.structs.replace(LEVELS, room_tokens=10 * B)
    assert isinstance(admission.reserve(TurnId("a"), Seed(6 * B), levels=levels, now=0.0), Reserved)
    standing = admission.standing(levels, 0.0)
    assert probe_seed(Seed(6 * B), standing) == Reject(WorkerRefusal.NO_ROOM)


def test_a_session_is_not_released_under_a_turn_that_runs(
    driver: NodeDriver, admission: Admission
) -> None:
    running = Turn(TurnId("r"), SESSION, pack(range(10 * B + 5)))
    assert isinstance(driver.cache.begin(running, driver.now), Begun)
    assert admission.release_session(SESSION) == Reject(WorkerRefusal.SESSION_IS_RUNNING)
    driver.cache.abort(running.turn_id, driver.now)
    assert admission.release_session(SESSION) == Released()
    driver.check()


def test_a_session_is_released_once(driver: NodeDriver, admission: Admission) -> None:
    assert admission.release_session(SESSION) == Released()
    assert admission.release_session(SESSION) == Reject(WorkerRefusal.UNKNOWN_SESSION)
    driver.check()


# ---- the wire

STATUS = WorkerLoad(
    unit=RoutingUnit(WorkerId("w"), 0, Incarnation(3)),
    as_of=1.0,
    pending_prefill_tokens=0,
    running_sequences=0,
    waiting_sequences=0,
    kv_bytes_free=1,
    kv_bytes_total=2,
)


class Desk:
    """Answers at once, in the server's thread."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.is_alive = True

    def __call__(self, request: RpcRequest) -> Future[RpcAnswer]:
        if not self.is_alive:
            raise RuntimeError("the engine has stopped")
        answer: Future[RpcAnswer] = Future()
        answer.set_result(self.answer(request))
        return answer

    def answer(self, request: RpcRequest) -> RpcAnswer:
        match request:
            case Probe(wanted):
                return probe_seed(wanted, self.admission.standing(LEVELS, 0.0))
            case Reserve(turn_id, wanted):
                return self.admission.reserve(turn_id, wanted, levels=LEVELS, now=0.0)
            case Commit(number):
                return self.admission.commit(number, 0.0)
            case Release(number):
                return self.admission.release(number)
        return StatusIs(STATUS)


@pytest.fixture
def desk(admission: Admission) -> Desk:
    return Desk(admission)


@pytest.fixture
def client(desk: Desk) -> Iterator[RpcClient]:
    server = RpcServer()
    server.start(desk)
    client = RpcClient(server.address)
    yield client
    client.close()
    server.stop()


def test_probe_reserve_commit_over_the_wire(client: RpcClient) -> None:
    assert client.ask(Status()) == StatusIs(STATUS)
    assert client.ask(Probe(Seed(5))) == Admit(100)
    held = client.ask(Reserve(TurnId("t"), Seed(B)))
    assert isinstance(held, Reserved)
    assert isinstance(client.ask(Commit(held.reservation)), Committed)
    assert client.ask(Release(held.reservation)) == Released()
    assert client.ask(Commit(held.reservation)) == Reject(WorkerRefusal.UNKNOWN_RESERVATION)


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x92\x01\xa1x", encode(Status())[:-3]])
def test_junk_is_refused_and_the_port_lives(desk: Desk, junk: bytes) -> None:
    server = RpcServer()
    server.start(desk)
    client = FramedClient(server.address, timeout_s=4.0, key=None, read_bytes_max=-1)
    assert decode_answer(client.ask(junk)) == Reject(WorkerRefusal.MALFORMED)
    assert decode_answer(client.ask(encode(Status()))) == StatusIs(STATUS)
    client.close()
    server.stop()


def test_another_version_is_refused() -> None:
    frame = msgspec.msgpack.decode(encode(Status()))
    frame[0] = 99
    with pytest.raises(InvalidInput, match="version 99"):
        decode_request(msgspec.msgpack.encode(frame))


def test_a_field_of_a_later_version_is_ignored() -> None:
    frame = msgspec.msgpack.decode(encode(Commit(4)))
    frame[1]["colour"] = "blue"
    assert decode_request(msgspec.msgpack.encode(frame)) == (Commit(4), NO_NONCE)


def test_a_dead_engine_is_a_refusal(desk: Desk, client: RpcClient) -> None:
    desk.is_alive = False
    assert client.ask(Status()) == Reject(WorkerRefusal.ENGINE_BUSY)


def test_only_loopback_is_bound() -> None:
    with pytest.raises(InvalidInput, match="reachable from outside"):
        RpcServer(host="0.0.0.0")


def test_a_taken_port_is_one_clear_error() -> None:
    taken = zmq.Context.instance().socket(zmq.REP)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(InvalidInput, match="use a free one"):
        RpcServer(port=port)
    taken.close()
