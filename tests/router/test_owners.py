"""The gateway's side of the directory, against the real one in memory: no sockets, no clock."""

from __future__ import annotations

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import FindSession, Refusal, Refused, SessionIs
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.owners import RENEW_S, Owners
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed

A, B = SessionId("a"), SessionId("b")


def unit(name: str, life: int = 1) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), 0, Incarnation(life))


class Side:
    """One gateway at a directory."""

    def __init__(self, directory: EmbeddedDirectory, clock: ManualClock) -> None:
        self.owners = Owners()
        self.directory = directory
        self.clock = clock

    def settle(self) -> list[Claimed]:
        """Ask until nothing is due."""
        news = []
        while requests := self.owners.due(self.clock.now()):
            news += self.owners.answered(requests, self.directory.execute(requests))
        return news

    def ask(self, session: SessionId) -> SessionIs:
        (found,) = self.directory.execute([FindSession(session)])
        assert isinstance(found, SessionIs)
        return found


def sides(count: int = 1) -> list[Side]:
    clock = ManualClock()
    directory = EmbeddedDirectory(clock, TermFile(), lease_s=5.0, opens_in_s=0.0)
    return [Side(directory, clock) for _ in range(count)]


def test_a_session_is_bound_moved_and_ended() -> None:
    (one,) = sides()
    for name in ("w1", "w2"):
        one.owners.lives(unit(name))
    one.owners.runs_at(A, unit("w1"))
    (claimed,) = one.settle()
    assert (claimed.session, claimed.unit) == (A, unit("w1"))
    one.owners.runs_at(A, unit("w1"))
    assert one.owners.due(one.clock.now()) == []  # nothing new to say
    one.owners.stands_on(A, unit("w1"), Extent(PrefixHash(b"p" * 32), 640))
    one.settle()
    assert one.ask(A).tokens == 640
    one.owners.runs_at(A, unit("w2"))
    (moved,) = one.settle()
    assert moved.unit == unit("w2")
    assert moved.epoch > claimed.epoch
    one.owners.ends(A)
    one.settle()
    assert one.owners.grants == {}
    assert one.owners.answers["ended"] == 1


def test_whoever_comes_second_hears_who_was_first() -> None:
    one, two = sides(2)
    for side in (one, two):
        for name in ("w1", "w2"):
            side.owners.lives(unit(name))
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    two.owners.runs_at(A, unit("w2"))
    assert [(news.session, news.unit) for news in two.settle()] == [(A, unit("w1"))]
    assert one.ask(A).owner == unit("w1")


def test_a_move_on_an_old_view_loses() -> None:
    """Compare-and-set: `two` learns of the session, then `one` moves it."""
    one, two = sides(2)
    for side in (one, two):
        for name in ("w1", "w2", "w3"):
            side.owners.lives(unit(name))
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    request = FindSession(A)
    two.owners.answered([request], two.directory.execute([request]))
    one.owners.runs_at(A, unit("w2"))
    one.settle()
    two.owners.runs_at(A, unit("w3"))
    assert [news.unit for news in two.settle()] == [unit("w2")]
    assert two.owners.answers["conflict"] == 1


def test_who_is_silent_loses_what_it_owned_and_a_new_life_has_nothing() -> None:
    (one,) = sides()
    for name in ("w1", "w2"):
        one.owners.lives(unit(name))
    one.owners.runs_at(A, unit("w1"))
    one.owners.runs_at(B, unit("w2"))
    one.settle()
    one.owners.silent("w1")
    for _ in range(8):
        one.clock.advance(RENEW_S)
        one.settle()
    assert not one.ask(A).owner_live
    assert one.ask(B).owner_live
    one.owners.lives(unit("w2", life=2))
    one.settle()
    assert not one.ask(B).owner_live


def test_a_directory_that_forgot_is_told_again() -> None:
    (one,) = sides()
    one.owners.lives(unit("w1"))
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    one.directory.forget()
    for _ in range(8):  # no new owner before every lease of before has run out
        one.clock.advance(RENEW_S)
        one.settle()
    one.owners.runs_at(A, unit("w1"))
    assert [news.unit for news in one.settle()] == [unit("w1")]


def test_what_a_rebuilding_directory_put_off_is_asked_again_without_a_turn() -> None:
    (one,) = sides()
    one.owners.lives(unit("w1"))
    one.settle()
    one.directory.forget()
    one.owners.runs_at(A, unit("w1"))
    assert one.settle() == []
    news: list[Claimed] = []
    for _ in range(8):
        one.clock.advance(RENEW_S)
        news += one.settle()
    assert [(claimed.session, claimed.unit) for claimed in news] == [(A, unit("w1"))]
    assert one.owners.answers["rebuilding"] > 0


def test_an_unreachable_directory_is_not_asked_in_a_loop() -> None:
    owners = Owners()
    owners.lives(unit("w1"))
    owners.runs_at(A, unit("w1"))
    requests = owners.due(0.0)
    assert owners.answered(requests, [Refused(Refusal.UNREACHABLE) for _ in requests]) == []
    assert owners.due(0.0) == []
    assert len(owners.due(RENEW_S)) == 1
    assert owners.answers["unreachable"] == len(requests)
