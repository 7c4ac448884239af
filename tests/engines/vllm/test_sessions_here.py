"""What an engine core tells of its sessions' turns, with a real directory behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.engines.vllm.scheduler_side.owning import SessionsHere
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import AskLine, Reject, Released, ReleaseSession
from ownerserve.node.ownership.ownership import Ownership, boot_time_s
from tests.support.waits import until

NAME, PARENT = SessionId("5" * 32), SessionId("6" * 32)
GROUP = "7" * 32
UNIT, OTHER = (RoutingUnit(WorkerId(f"v{n}"), 0, Incarnation(n + 1)) for n in range(2))
BLOCK = 16
TOKENS = pack(range(3 * BLOCK + 5))


class BootClock:
    def now(self) -> float:
        return boot_time_s()


def turn(session: str = NAME, status: str = "FINISHED_STOPPED") -> Any:
    """vLLM's request, as far as it is read."""
    return SimpleNamespace(session_id=session, status=SimpleNamespace(name=status))


@pytest.fixture
def server() -> Iterator[DirectoryServer]:
    one = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), lease_s=5.0, opens_in_s=0.0))
    one.start()
    yield one
    one.stop()


@pytest.fixture
def sessions(server: DirectoryServer) -> Iterator[SessionsHere]:
    ownership = Ownership(
        UNIT, lambda: DirectoryClient(server.address), block_tokens=BLOCK, scope=b"s" * 32
    )
    ownership.start()
    one = SessionsHere(ownership)
    yield one
    one.close()


def record(server: DirectoryServer, session: SessionId = NAME) -> ask.SessionIs | None:
    client = DirectoryClient(server.address)
    try:
        (found,) = client.execute([ask.FindSession(session)])
    finally:
        client.close()
    return found if isinstance(found, ask.SessionIs) else None


def version(server: DirectoryServer) -> int:
    found = record(server)
    return -1 if found is None else found.version


def test_a_turn_that_was_given_up_is_not_counted(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.came(turn())
    sessions.ended(turn(status="FINISHED_ABORTED"), TOKENS)
    until(lambda: record(server))
    sessions.came(turn())
    sessions.ended(turn(), TOKENS)
    until(lambda: version(server) == 1)


def test_a_session_is_not_given_up_while_any_turn_of_it_is_here(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.came(turn())
    sessions.came(turn())
    until(lambda: record(server))
    found = record(server)
    assert found is not None
    wish = ReleaseSession(NAME, found.epoch, OTHER)
    busy = Reject(WorkerRefusal.SESSION_IS_RUNNING)
    assert sessions.release(wish) == busy
    sessions.ended(turn(), TOKENS)
    assert sessions.release(wish) == busy
    sessions.ended(turn(), TOKENS)
    until(lambda: version(server) == 2)
    assert sessions.release(wish) == Released()


def test_turns_that_the_gateway_knows_of_count(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.heard(AskLine(NAME, version=7))
    sessions.came(turn())
    sessions.ended(turn(), TOKENS)
    until(lambda: version(server) == 8)


def test_a_fork_and_its_group_are_told_beside_the_request(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.came(turn(PARENT))
    sessions.ended(turn(PARENT), TOKENS)
    until(lambda: (found := record(server, PARENT)) and found.tokens)
    sessions.heard(AskLine(NAME, PARENT, GROUP))
    sessions.came(turn())
    until(lambda: record(server))
    found = record(server)
    assert found is not None and (found.tokens, found.version) == (3 * BLOCK, 0), "as its parent"
    sessions.ended(turn(), TOKENS)
    until(lambda: version(server) == 1)
    client = DirectoryClient(server.address)
    try:
        (group,) = client.execute([ask.FindGroup(GROUP)])
    finally:
        client.close()
    assert isinstance(group, ask.GroupIs) and group.members


def test_a_fork_is_counted_where_its_line_comes_after_its_turn(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.came(turn(PARENT))
    sessions.ended(turn(PARENT), TOKENS)
    until(lambda: (found := record(server, PARENT)) and found.tokens)
    sessions.came(turn())  # vLLM's queue was faster than the worker's line
    sessions.heard(AskLine(NAME, PARENT))
    until(lambda: record(server))
    found = record(server)
    assert found is not None and (found.tokens, found.version) == (3 * BLOCK, 0), "as its parent"


def test_a_session_stays_over_when_its_last_answer_is_asked_about(
    sessions: SessionsHere, server: DirectoryServer
) -> None:
    sessions.came(turn())
    sessions.ended(turn(), TOKENS)
    until(lambda: version(server) == 1)
    sessions.came(turn(f"{NAME};final"))
    sessions.ended(turn(f"{NAME};final"), TOKENS)
    sessions.heard(AskLine(NAME))
    until(lambda: record(server) is None)
    time.sleep(0.3)
    assert record(server) is None


def test_a_clients_own_name_is_nobodys(sessions: SessionsHere) -> None:
    sessions.came(turn("mine"))
    assert sessions.release(ReleaseSession(SessionId("mine"))) == Reject(
        WorkerRefusal.SESSION_IS_RUNNING
    )
    sessions.ended(turn("mine"), TOKENS)
    assert sessions.heard(AskLine(SessionId("mine"))) is None
    assert sessions.release(ReleaseSession(SessionId("mine"))) == Released()
