"""Which sessions a worker that leaves stays for: two units and their directory, over sockets, and a
cache of each. Real workers: engines/hf/test_leaving_guests.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Install
from ownerserve.cache.sessions import SessionView
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.owner import doors
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import AskSession, Reject, Released, ReleaseSession, SessionStands
from ownerserve.node.ownership.keeping import GUEST_S, Staying, ask_whose, keeps_worker
from ownerserve.node.ownership.ownership import (
    Ownership,
    TurnCame,
    TurnLeft,
    Unowned,
    boot_time_s,
)
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.moves import LeavingSessions, MovingEngine
from tests.support.node.lending_nodes import AGENT, LAYOUT, B
from tests.support.waits import until

LEFT = pack(range(2 * B + 3))
ENDED_S = 10.0
"""When its last turn ended, on a cache's clock."""


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Unit:
    """One unit, and a cache in which a turn of the session has ended. It has no engine: nothing of
    it runs."""

    def __init__(self, name: str, directory: str) -> None:
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(1))
        self.ownership = Ownership(
            self.unit,
            lambda: DirectoryClient(directory, timeout_s=0.5),
            block_tokens=B,
            scope=bytes(32),
        )
        self.ownership.start()
        self.cache = HeteroCache(LAYOUT, {"dense": 8, "swa": 8}, 2)
        self.ownership.tell(TurnCame(AGENT))
        whole = LEFT[: 8 * B]
        there = Install(AGENT, 1, whole, LEFT[8 * B :], hash_prefix(whole, B)[-1])
        assert self.cache.install(there, ENDED_S) is None
        self.ownership.tell(TurnLeft(AGENT, LEFT))

    @property
    def session(self) -> SessionView:
        session = self.cache.sessions.get(AGENT)
        assert session is not None
        return session

    @property
    def owner(self) -> RoutingUnit | None:
        """Whose the session is, as far as was heard here."""
        found = self.ownership.owner_of(AGENT)
        return None if found is None else found.unit

    def stands(self) -> SessionStands | Reject:
        """What it says to who would take the session over."""

        engine = cast(MovingEngine, SimpleNamespace(ownership=self.ownership))
        leaving = LeavingSessions(self.cache, engine, cast(OnEngine, None))
        return leaving.stands(AskSession(AGENT))

    def keeps_worker(self, after_s: float) -> bool:
        return keeps_worker(self.session, self.ownership, ENDED_S + after_s)


@pytest.fixture
def owner_and_guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Unit, Unit]]:
    """By itself the guest asks whose the session is once, and again in an hour."""
    monkeypatch.setattr(doors, "AGAIN_S", 3600.0)
    server = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    server.start()
    owner = Unit("owner", server.address)
    until(lambda: owner.ownership.standing(AGENT))
    guest = Unit("guest", server.address)
    until(lambda: guest.ownership.owner_of(AGENT))
    yield owner, guest
    for one in (owner, guest):
        one.ownership.close(within_s=5.0)
    server.stop()


def test_a_worker_stays_for_its_own_session_and_not_for_a_guests(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    owner, guest = owner_and_guest
    assert owner.keeps_worker(0.0) and owner.keeps_worker(3600.0)
    assert guest.keeps_worker(GUEST_S - 0.1), "its owner may be asked to hand it over"
    assert not guest.keeps_worker(GUEST_S)


def test_what_went_elsewhere_keeps_nobody_and_what_was_heard_of_nowhere_does(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    owner, _ = owner_and_guest
    assert keeps_worker(owner.session, Unowned(), ENDED_S + 3600.0), "there is no directory"
    owner.cache.sessions.let_go(AGENT)
    assert not owner.keeps_worker(0.0)


def test_who_is_asked_for_anothers_session_asks_whether_it_still_is(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    """Its owner hands it over to who had its turn, and nobody tells that one."""
    owner, guest = owner_and_guest
    grant = owner.ownership.standing(AGENT)
    assert grant is not None
    released = owner.ownership.release(ReleaseSession(AGENT, grant.epoch, guest.unit))
    assert released == Released()
    until(lambda: owner.owner == guest.unit)
    assert guest.owner == owner.unit
    assert guest.stands() == Reject(WorkerRefusal.NOT_OWNER)
    until(lambda: guest.owner == guest.unit)
    assert isinstance(guest.stands(), SessionStands)
    assert guest.keeps_worker(3600.0) and not owner.keeps_worker(3600.0)


def test_who_begins_to_leave_asks_whose_the_sessions_are_that_it_serves_as_a_guest(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    owner, guest = owner_and_guest
    grant = owner.ownership.standing(AGENT)
    assert grant is not None
    owner.ownership.release(ReleaseSession(AGENT, grant.epoch, guest.unit))
    until(lambda: owner.owner == guest.unit)
    assert not guest.keeps_worker(3600.0)
    ask_whose(guest.cache.sessions, guest.ownership)
    until(lambda: guest.keeps_worker(3600.0))


def test_who_leaves_stays_for_what_its_guests_turns_added_until_that_was_brought(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    """From its leaving on, however long ago the turn was; who brought it has it let go here."""
    _, guest = owner_and_guest
    now_s = ENDED_S + 3600.0
    staying = Staying(guest.cache.sessions, guest.ownership, lambda: now_s)
    assert not staying.is_wanted()
    staying.begin()
    now_s += GUEST_S - 0.1
    assert staying.is_wanted()
    guest.cache.sessions.let_go(AGENT)
    assert not staying.is_wanted()


def test_who_leaves_does_not_stay_for_a_guests_turn_that_nobody_brings(
    owner_and_guest: tuple[Unit, Unit],
) -> None:
    now_s = ENDED_S + 3600.0
    stays = [Staying(one.cache.sessions, one.ownership, lambda: now_s) for one in owner_and_guest]
    for staying in stays:
        staying.begin()
    now_s += GUEST_S
    assert [staying.is_wanted() for staying in stays] == [True, False]
