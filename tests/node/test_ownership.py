"""A node's thread with the directory: real sockets, a real directory service, real time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.owner.state import OwnerPhase
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.prefix import Packed, hash_prefix, pack
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Released, ReleaseSession
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.ownership import (
    Ownership,
    SessionLeft,
    TurnCame,
    TurnLeft,
    boot_time_s,
)
from ownerserve.node.ownership.publishing import extent_name
from tests.support.waits import until

S1, S2 = SessionId("s1"), SessionId("s2")
WAIT_S = 300.0


class BootClock:
    def now(self) -> float:
        return boot_time_s()


def unit(name: str, life: int = 1) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), 0, Incarnation(life))


BLOCK = 16
SCOPE = bytes(32)


def tokens(blocks: int) -> Packed:
    """What a session of so many blocks, and a bit more, has left."""
    return pack(range(blocks * BLOCK + 3))


def name(blocks: int, scope: bytes = SCOPE) -> PrefixHash:
    """What the directory calls them."""
    return extent_name(scope, hash_prefix(tokens(blocks), BLOCK)[-1])


def serve(*, port: int = 0, lease_s: float = 5.0, opens_in_s: float = 0.0) -> DirectoryServer:
    embedded = EmbeddedDirectory(BootClock(), TermFile(), lease_s=lease_s, opens_in_s=opens_in_s)
    server = DirectoryServer(embedded, port=port)
    server.start()
    return server


@pytest.fixture
def server() -> Iterator[DirectoryServer]:
    one = serve()
    yield one
    one.stop()


@pytest.fixture
def holds() -> dict[RoutingUnit, Inventory]:
    """What each node holds, for the tests to say."""
    return {}


@pytest.fixture
def nodes(holds: dict[RoutingUnit, Inventory]) -> Iterator[Callable[[RoutingUnit, str], Ownership]]:
    made: list[Ownership] = []

    def join(which: RoutingUnit, address: str) -> Ownership:
        node = Ownership(
            which, lambda: DirectoryClient(address, timeout_s=0.5), block_tokens=BLOCK, scope=SCOPE
        )
        made.append(node)
        node.start()
        return node

    yield join
    for node in made:
        node.close(within_s=5.0)


def found(address: str, session: SessionId) -> ask.SessionIs | ask.Miss:
    client = DirectoryClient(address)
    try:
        (outcome,) = client.execute([ask.FindSession(session)])
    finally:
        client.close()
    assert isinstance(outcome, ask.SessionIs | ask.Miss)
    return outcome


def is_at(address: str, session: SessionId, version: int) -> bool:
    record = found(address, session)
    return isinstance(record, ask.SessionIs) and record.version == version


def test_turns_that_end_together_go_as_one_report(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    frames = node.frames
    for number in range(1, 21):
        node.tell(TurnLeft(S1, tokens(number)))
    until(lambda: is_at(server.address, S1, 20))
    record = found(server.address, S1)
    assert isinstance(record, ask.SessionIs)
    assert (record.owner, record.prefix_hash, record.tokens) == (
        node.owner.unit, name(20), 20 * BLOCK,
    )  # fmt: skip
    assert node.frames - frames < 20


def test_a_turn_that_ends_before_its_session_is_bound_counts(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    node.tell(TurnLeft(S1, tokens(1)))
    until(lambda: is_at(server.address, S1, 1))


@pytest.mark.parametrize("is_bound", [True, False])
def test_turns_that_an_owner_finished_and_never_told_count_by_their_gateways_word(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership], is_bound: bool
) -> None:
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1) or not is_bound)
    node.tell(TurnLeft(S1, tokens(1), before=7))
    until(lambda: is_at(server.address, S1, 8))
    node.tell(TurnLeft(S1, tokens(2), before=7))
    until(lambda: is_at(server.address, S1, 9))


def test_a_guest_tells_nothing_and_owns_once_the_owner_has_left(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    first, second = nodes(unit("w1"), server.address), nodes(unit("w2"), server.address)
    first.tell(TurnCame(S1))
    first.tell(TurnLeft(S1, tokens(1)))
    until(lambda: is_at(server.address, S1, 1))
    second.tell(TurnCame(S1))
    second.tell(TurnLeft(S1, tokens(2)))
    until(lambda: second.answers["heldby"])
    assert second.standing(S1) is None and is_at(server.address, S1, 1)
    first.close(within_s=5.0)
    second.tell(TurnCame(S1))
    until(lambda: second.standing(S1))
    second.tell(TurnLeft(S1, tokens(3)))
    until(lambda: is_at(server.address, S1, 2))  # a change of owner finishes no turn


def test_an_ended_session_is_forgotten(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    node.tell(SessionLeft(S1))
    until(lambda: isinstance(found(server.address, S1), ask.Miss))
    assert node.standing(S1) is None


def test_a_directory_that_comes_late_holds_up_nobody(
    nodes: Callable[[RoutingUnit, str], Ownership],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = nodes(unit("w1"), f"tcp://127.0.0.1:{port}")
    began_s = time.thread_time()
    for number in range(1, 4):
        node.tell(TurnCame(S1))
        node.tell(TurnLeft(S1, tokens(number)))
        assert node.standing(S1) is None
    assert time.thread_time() - began_s < 1.0
    late = serve(port=port)
    try:
        until(lambda: is_at(late.address, S1, 3))
        assert node.phase is OwnerPhase.LIVE
    finally:
        late.stop()


class Faulty:
    """A directory whose backend fails until it is mended."""

    def __init__(self, address: str, fault: Exception | list[ask.Outcome]) -> None:
        self._client = DirectoryClient(address, timeout_s=0.5)
        self.fault: Exception | list[ask.Outcome] | None = fault
        self.asked = 0

    def execute(self, requests: Sequence[ask.Request]) -> list[ask.Outcome]:
        self.asked += 1
        if isinstance(self.fault, Exception):
            raise self.fault
        return self._client.execute(requests) if self.fault is None else self.fault

    def close(self) -> None:
        self._client.close()


@pytest.mark.parametrize("fault", [RuntimeError("boom"), []])
def test_a_fault_of_the_directory_ends_no_thread_and_does_not_spin(
    server: DirectoryServer, fault: Exception | list[ask.Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(server.address, fault)
    node = Ownership(unit("w1"), lambda: faulty, block_tokens=BLOCK, scope=SCOPE)  # type: ignore[arg-type, return-value]
    node.start()
    node.tell(TurnCame(S1))
    until(lambda: node.answers["failed"] >= 2)
    time.sleep(1.0)
    assert faulty.asked <= 8
    assert len([one for one in caplog.records if one.name == "ownerserve.node"]) == 1
    faulty.fault = None
    until(lambda: node.standing(S1))
    node.close(within_s=5.0)


def test_a_directory_that_is_being_rebuilt_is_asked_for_a_session_when_that_is_over(
    nodes: Callable[[RoutingUnit, str], Ownership],
) -> None:
    server = serve(opens_in_s=2.5)
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    client = DirectoryClient(server.address)
    assert client.status().asked["bind"] <= 3, "not every half second"
    client.close()
    node.close(within_s=5.0)
    server.stop()


def test_a_directory_that_cannot_be_opened_yet_is_opened_later(server: DirectoryServer) -> None:
    tries = []

    def opened() -> DirectoryClient:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("too many open files")
        return DirectoryClient(server.address, timeout_s=0.5)

    node = Ownership(unit("w1"), opened, block_tokens=BLOCK, scope=SCOPE)
    node.start()
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    assert node.answers["failed"] == 2
    node.close(within_s=5.0)
    assert found(server.address, S1)


def test_a_node_closes_while_its_directory_fails(server: DirectoryServer) -> None:
    faulty = Faulty(server.address, RuntimeError("boom"))
    node = Ownership(unit("w1"), lambda: faulty, block_tokens=BLOCK, scope=SCOPE)  # type: ignore[arg-type, return-value]
    node.start()
    node.tell(TurnCame(S1))
    until(lambda: node.answers["failed"])
    node.close(within_s=5.0)
    assert "ownership" not in {thread.name for thread in threading.enumerate()}


def test_a_former_life_is_told_so_and_owns_nothing(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    former = nodes(unit("w1", 1), server.address)
    former.tell(TurnCame(S1))
    until(lambda: former.standing(S1))
    later = nodes(unit("w1", 2), server.address)
    later.tell(TurnCame(S1))
    until(lambda: later.standing(S1))
    former.tell(TurnLeft(S1, tokens(1)))
    until(lambda: former.standing(S1) is None)
    until(lambda: former.phase is OwnerPhase.SUPERSEDED)


def release(node: Ownership, target: RoutingUnit, epoch: Epoch | None = None) -> Released | Reject:
    """As the owner's gateway asks it, which knows the epoch that the last answer told."""
    grant = node.standing(S1)
    told = epoch if epoch is not None or grant is None else grant.epoch
    return node.release(ReleaseSession(S1, told, target))


def test_a_session_that_is_released_is_the_targets(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    first, second = nodes(unit("w1"), server.address), nodes(unit("w2"), server.address)
    first.tell(TurnCame(S1))
    until(lambda: first.standing(S1))
    until(lambda: second.phase is OwnerPhase.LIVE)
    grant = first.standing(S1)
    assert grant is not None
    first.tell(TurnLeft(S1, tokens(1)))
    assert release(first, second.owner.unit) == Reject(WorkerRefusal.SESSION_IS_RUNNING)
    until(lambda: release(first, second.owner.unit, grant.epoch) == Released())
    assert first.standing(S1) is None  # at once
    until(lambda: first.answers["bound"] == 2)
    record = found(server.address, S1)
    assert isinstance(record, ask.SessionIs)
    assert (record.owner, record.version) == (second.owner.unit, 1)

    first.tell(TurnCame(S1))  # its own later turn is a guest's
    first.tell(TurnLeft(S1, tokens(9)))
    until(lambda: first.answers["heldby"])
    assert release(first, second.owner.unit, grant.epoch) == Reject(WorkerRefusal.STALE_EPOCH)
    second.tell(TurnCame(S1))
    until(lambda: second.standing(S1))
    second.tell(TurnLeft(S1, tokens(2)))
    until(lambda: is_at(server.address, S1, 2))
    assert first.owner.refused["release", "stale_epoch"] == 1


@pytest.mark.parametrize("left", [tokens(2), pack(range(3))], ids=["blocks", "no_block"])
def test_who_had_a_guests_turn_asks_for_what_is_given_to_it_after(
    nodes: Callable[[RoutingUnit, str], Ownership], left: bytes
) -> None:
    """Nobody tells it. It asks with its lease's renewal, however little the turn left."""
    server = serve(lease_s=2.0)
    try:
        first, second = nodes(unit("w1"), server.address), nodes(unit("w2"), server.address)
        first.tell(TurnCame(S1))
        until(lambda: first.standing(S1))
        grant = first.standing(S1)
        assert grant is not None
        second.tell(TurnCame(S1))
        until(lambda: second.answers["heldby"])
        second.tell(TurnLeft(S1, left))
        until(lambda: release(first, second.owner.unit, grant.epoch) == Released())
        until(lambda: second.standing(S1), within_s=10.0)
    finally:
        first.close(within_s=5.0)
        second.close(within_s=5.0)
        server.stop()


def test_a_directory_that_hangs_holds_up_no_release(server: DirectoryServer) -> None:
    """The session is a guest's at once, and moves when the directory answers again."""
    faulty = Faulty(server.address, RuntimeError("boom"))
    faulty.fault = None
    node = Ownership(unit("w1"), lambda: faulty, block_tokens=BLOCK, scope=SCOPE)  # type: ignore[arg-type, return-value]
    target = Ownership(
        unit("w2"), lambda: DirectoryClient(server.address), block_tokens=BLOCK, scope=SCOPE
    )
    node.start()
    target.start()
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1) and target.phase is OwnerPhase.LIVE)
    faulty.fault = RuntimeError("boom")
    began_s = time.thread_time()
    assert release(node, target.owner.unit) == Released()
    assert time.thread_time() - began_s < 1.0 and node.standing(S1) is None
    until(lambda: node.answers["failed"])
    faulty.fault = None

    def is_moved() -> bool:
        record = found(server.address, S1)
        return isinstance(record, ask.SessionIs) and record.owner == target.owner.unit

    until(is_moved)
    node.close(within_s=5.0)
    target.close(within_s=5.0)


def test_what_a_turns_line_says_counts_at_once(server: DirectoryServer) -> None:
    """Also while the directory holds up the thread that asks it."""
    faulty = Faulty(server.address, RuntimeError("boom"))
    faulty.fault = None
    node = Ownership(unit("w1"), lambda: faulty, block_tokens=BLOCK, scope=SCOPE)  # type: ignore[arg-type, return-value]
    node.start()
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    grant = node.standing(S1)
    assert grant is not None
    faulty.fault = RuntimeError("boom")
    node.tell(TurnCame(S1, epoch=Epoch(grant.epoch.term, grant.epoch.counter + 1)))
    assert node.standing(S1) is None
    told = ReleaseSession(S1, grant.epoch, unit("w2"))
    assert node.release(told) == Reject(WorkerRefusal.STALE_EPOCH)
    node.close(within_s=5.0)


def test_a_round_that_fails_keeps_no_session_for_ever(
    server: DirectoryServer,
    nodes: Callable[[RoutingUnit, str], Ownership],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That one turn is lost, nothing that was told beside it, and its session is given up as any
    other."""
    w1 = nodes(unit("w1"), server.address)
    w1.tell(TurnCame(S2))
    w1.tell(TurnCame(S1))
    w1.tell(TurnLeft(S1, tokens(2)))
    until(lambda: is_at(server.address, S1, 1) and w1.standing(S2))
    with monkeypatch.context() as patch:
        patch.setattr(w1.publishing, "belongs", raises)
        w1.tell(TurnLeft(S1, tokens(3)))
        w1.tell(SessionLeft(S2))  # with the same frame
        until(lambda: w1.answers["failed"] == 1)
        until(lambda: w1.standing(S2) is None)
    grant = w1.standing(S1)
    assert grant is not None and grant.version == 1
    assert release(w1, unit("w2"), grant.epoch) == Released()


def test_a_version_that_was_told_never_goes_back(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    """A turn that leaves less than a block advances nothing: it is not told as counted first."""
    w1 = nodes(unit("w1"), server.address)
    w1.tell(TurnCame(S1))
    until(lambda: w1.standing(S1))
    w1.tell(TurnLeft(S1, pack(range(3))))
    told = w1.standing(S1)
    w1.tell(TurnLeft(S1, tokens(1)))
    until(lambda: is_at(server.address, S1, 1))
    now = w1.standing(S1)
    assert told is not None and now is not None
    assert (told.version, now.version) == (0, 1)


def test_a_fork_stands_on_its_parents_tip(
    server: DirectoryServer, nodes: Callable[[RoutingUnit, str], Ownership]
) -> None:
    w1 = nodes(unit("w1"), server.address)
    w1.tell(TurnCame(S1))
    w1.tell(TurnLeft(S1, tokens(2)))
    until(lambda: is_at(server.address, S1, 1))
    w1.tell(TurnCame(S2, parent=S1))
    until(lambda: w1.standing(S2))
    client = DirectoryClient(server.address)
    (tip,) = client.execute([ask.Lookup((name(2),))])
    client.close()
    assert isinstance(tip, ask.Found) and tip.refs == 2


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("a fault of this node")


def test_a_session_whose_last_turn_was_elsewhere_ends_at_its_owner(
    nodes: Callable[[RoutingUnit, str], Ownership], server: DirectoryServer
) -> None:
    node = nodes(unit("w1"), server.address)
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    grant = node.standing(S1)
    assert grant is not None
    assert node.release(ReleaseSession(S1, grant.epoch)) == Released()
    assert node.standing(S1) is None
    until(lambda: isinstance(found(server.address, S1), ask.Miss))
    again = node.release(ReleaseSession(S1, grant.epoch))
    assert again == Reject(WorkerRefusal.NOT_OWNER)
