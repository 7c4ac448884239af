"""The gateway's side of the directory, against the real one in memory: no sockets, no clock."""

from __future__ import annotations

import pytest

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import (
    Bind,
    FindSession,
    Miss,
    Refusal,
    Refused,
    Retire,
    SessionIs,
)
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway import owners
from ownerserve.router.gateway.owners import RENEW_S, Owners
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed

A, B = SessionId("a"), SessionId("b")
EXTENT = Extent(PrefixHash(b"p" * 32), 640)


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

    def renewed(self) -> list[Claimed]:
        """The same when it is time for the next renewal."""
        self.clock.advance(RENEW_S)
        return self.settle()

    def refused(self, reason: Refusal) -> None:
        """What is due is not done."""
        requests = self.owners.due(self.clock.now())
        assert requests
        self.owners.answered(requests, [Refused(reason) for _ in requests])

    def ask(self, session: SessionId) -> SessionIs:
        (found,) = self.directory.execute([FindSession(session)])
        assert isinstance(found, SessionIs)
        return found


def sides(count: int = 1, *names: str) -> list[Side]:
    """Gateways at one directory, each of which sees these workers."""
    clock = ManualClock()
    directory = EmbeddedDirectory(clock, TermFile(), lease_s=5.0, opens_in_s=0.0)
    found = [Side(directory, clock) for _ in range(count)]
    for side in found:
        for name in names:
            side.owners.lives(unit(name))
    return found


def served(*names: str) -> Side:
    """One gateway, whose workers are registered."""
    (one,) = sides(1, *names)
    one.settle()
    return one


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
    one, two = sides(2, "w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    two.owners.runs_at(A, unit("w2"))
    assert [(news.session, news.unit) for news in two.settle()] == [(A, unit("w1"))]
    assert one.ask(A).owner == unit("w1")


def test_a_move_on_an_old_view_loses() -> None:
    """Compare-and-set: `two` learns of the session, then `one` moves it."""
    one, two = sides(2, "w1", "w2", "w3")
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
    one = Owners()
    one.lives(unit("w1"))
    one.runs_at(A, unit("w1"))
    requests = one.due(0.0)
    assert one.answered(requests, [Refused(Refusal.UNREACHABLE) for _ in requests]) == []
    assert one.due(0.0) == []
    assert len(one.due(RENEW_S)) == len(requests)  # the same again, with the next renewal
    assert one.due(RENEW_S) == []
    assert one.answers["unreachable"] == len(requests)


def test_a_wish_that_waits_gives_way_to_a_later_turn() -> None:
    """A move that the directory put off is not made after the session is back, or moved on."""
    for last in ("w1", "w3"):
        one = served("w1", "w2", "w3")
        one.owners.runs_at(A, unit("w1"))
        one.settle()
        one.owners.runs_at(A, unit("w2"))
        one.refused(Refusal.CONTENDED)
        one.owners.runs_at(A, unit(last))
        one.renewed()
        one.renewed()
        assert one.ask(A).owner == unit(last)


def test_a_turn_back_home_undoes_the_move_under_way() -> None:
    one = served("w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    one.owners.runs_at(A, unit("w2"))
    moving = one.owners.due(one.clock.now())
    one.owners.runs_at(A, unit("w1"))  # no answer yet
    assert one.owners.answered(moving, one.directory.execute(moving)) == []
    assert [news.unit for news in one.settle()] == [unit("w1")]
    assert one.ask(A).owner == unit("w1")


def test_whoever_came_second_can_move_the_session_later() -> None:
    one, two = sides(2, "w1", "w2", "w3")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    two.owners.runs_at(A, unit("w2"))
    two.settle()
    two.owners.runs_at(A, unit("w3"))
    assert [news.unit for news in two.settle()] == [unit("w3")]
    assert one.ask(A).owner == unit("w3")


def test_a_report_of_an_earlier_turn_does_not_move_the_session_back() -> None:
    one = served("w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    one.owners.runs_at(A, unit("w2"))
    one.owners.stands_on(A, unit("w1"), EXTENT)
    one.settle()
    one.owners.stands_on(A, unit("w1"), EXTENT)
    one.settle()
    assert one.ask(A).owner == unit("w2")


def test_a_report_that_comes_before_the_session_is_bound_is_told() -> None:
    one = served("w1")
    one.owners.runs_at(A, unit("w1"))
    one.owners.stands_on(A, unit("w1"), EXTENT)
    one.settle()
    assert one.ask(A).tokens == EXTENT.tokens


def test_a_turn_without_a_report_finds_out_that_another_gateway_moved_the_session() -> None:
    one, two = sides(2, "w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    request = FindSession(A)
    two.owners.answered([request], two.directory.execute([request]))
    two.owners.runs_at(A, unit("w2"))
    two.settle()
    one.owners.runs_at(A, unit("w1"))
    assert one.settle() == []  # it was there: nothing is asked at once
    assert [news.unit for news in one.renewed()] == [unit("w2")]
    assert one.renewed() == []  # and once only
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    assert one.ask(A).owner == unit("w1")


def test_an_end_is_said_once_the_directory_listens() -> None:
    """The session's bind is under way; the end is not heard; the end waits for the directory."""
    one = served("w1")
    one.owners.runs_at(A, unit("w1"))
    binding = one.owners.due(one.clock.now())
    one.owners.ends(A)
    # The router has forgotten the session: it hears nothing of it any more.
    assert one.owners.answered(binding, one.directory.execute(binding)) == []
    one.refused(Refusal.UNREACHABLE)
    assert isinstance(one.directory.execute([FindSession(A)])[0], SessionIs)
    assert one.renewed() == []
    assert isinstance(one.directory.execute([FindSession(A)])[0], Miss)
    assert one.owners.grants == {}


def test_a_session_that_ended_while_it_was_not_bound_is_not_bound_later() -> None:
    one = served("w1")
    one.directory.forget()
    one.renewed()
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    assert one.owners.answers["rebuilding"] == 1
    one.owners.ends(A)
    one.owners.stands_on(A, unit("w1"), EXTENT)  # of another turn, which runs on
    for _ in range(8):
        one.renewed()
    assert isinstance(one.directory.execute([FindSession(A)])[0], Miss)


def test_a_life_that_the_router_heard_of_first_is_registered() -> None:
    """A worker's stamp tells of its restart before any probe does."""
    one = served("w1")
    one.owners.runs_at(B, unit("w1"))
    one.settle()
    one.owners.runs_at(A, unit("w1", life=2))
    assert [news.unit for news in one.settle()] == [unit("w1", life=2)]


def test_a_move_waits_for_its_target_to_be_registered() -> None:
    one = served("w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    one.directory.execute([Retire(unit("w2"))])
    one.owners.runs_at(A, unit("w2"))
    one.settle()
    assert one.owners.answers["target_not_live"] == 1
    one.renewed()
    one.renewed()
    assert one.ask(A).owner == unit("w2")


def test_a_session_that_another_gateway_ended_is_bound_anew_by_a_turn_not_by_a_report() -> None:
    one, two = sides(2, "w1", "w2")
    for session in (A, B):
        one.owners.runs_at(session, unit("w1"))
        one.settle()
        request = FindSession(session)
        two.owners.answered([request], two.directory.execute([request]))
        two.owners.ends(session)
        two.settle()
    one.owners.runs_at(A, unit("w2"))
    one.owners.stands_on(B, unit("w1"), EXTENT)
    one.settle()
    assert one.ask(A).owner == unit("w2")
    assert isinstance(one.directory.execute([FindSession(B)])[0], Miss)


def test_a_dead_workers_refusal_does_not_void_what_the_others_own() -> None:
    one = served("w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    one.owners.runs_at(B, unit("w2"))
    binding = one.owners.due(one.clock.now())
    one.owners.silent("w2")
    one.owners.answered(binding, [Refused(Refusal.LEASE_LAPSED) for _ in binding])
    assert one.settle() == []  # nobody registers anew
    one.owners.runs_at(A, unit("w1"))
    assert one.settle() == []
    assert one.renewed() == []
    assert one.owners.answers["bound"] == 1


def test_a_move_that_met_a_report_of_the_same_owner_is_made() -> None:
    """Another gateway's turn changed the version, not the owner."""
    one, two = sides(2, "w1", "w2")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    request = FindSession(A)
    two.owners.answered([request], two.directory.execute([request]))
    one.owners.stands_on(A, unit("w1"), EXTENT)
    one.settle()
    two.owners.runs_at(A, unit("w2"))
    assert [news.unit for news in two.settle()] == [unit("w2")]
    assert two.owners.answers["conflict"] == 1


def test_a_session_given_away_under_an_earlier_epoch_is_bound_above_what_was_seen() -> None:
    """The directory lost its memory and its term; the other gateway has seen nothing of before."""
    one = served("w1", "w2")
    one.directory.forget()  # a second term
    for _ in range(8):
        one.renewed()
    one.owners.runs_at(A, unit("w1"))
    (before,) = one.settle()
    fresh, two = EmbeddedDirectory(one.clock, TermFile(), lease_s=5.0, opens_in_s=0.0), Owners()
    one.directory = fresh
    side = Side(fresh, one.clock)
    side.owners = two
    two.lives(unit("w2"))
    two.runs_at(A, unit("w2"))
    (given,) = side.settle()
    assert given.epoch < before.epoch
    one.owners.runs_at(A, unit("w1"))
    for _ in range(8):
        side.settle()
        for news in one.renewed():
            assert news.epoch > before.epoch
    assert one.owners.grants[A].epoch > before.epoch
    assert one.ask(A).epoch == one.owners.grants[A].epoch


def test_wishes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ownerserve.router.gateway.owners.SESSIONS_MAX", 3)
    owners = Owners()
    for number in range(5):
        owners.runs_at(SessionId(str(number)), unit("w1"))
    binds = [request for request in owners.due(0.0) if isinstance(request, Bind)]
    assert [request.session_id for request in binds] == ["2", "3", "4"]


def test_after_a_long_outage_no_renewal_asks_for_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "ASKED_AGAIN_MAX", 10)
    one = served("w1")
    names = [SessionId(f"s{number}") for number in range(25)]
    for name in names:
        one.owners.runs_at(name, unit("w1"))
    one.refused(Refusal.UNREACHABLE)
    one.clock.advance(RENEW_S)
    one.refused(Refusal.UNREACHABLE)  # of the first ten, which stand last then
    for known in (names[10:20], [*names[10:], *names[:5]], names):
        one.renewed()
        assert set(one.owners.grants) == set(known)


def test_a_directory_that_forgot_says_so_though_another_gateway_came_first() -> None:
    """It knows the life again, by the other's registration: none of what we hold is known to it."""
    one, two = sides(2, "w1")
    one.owners.runs_at(A, unit("w1"))
    one.settle()
    two.settle()
    one.directory.forget()
    two.renewed()
    two.renewed()
    one.renewed()
    assert one.owners.answers["unknown_holder"] == 1
    one.owners.runs_at(A, unit("w1"))  # no more at home for sure: it is asked for at once
    assert one.owners.has_wishes
