"""Forks that wait for a busy worker, since bringing their prefix would have kept each of them
waiting longer, have it copied beside them; or the copy is wanted no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.decision import DispatchReason, Replica
from ownerserve.router.gap_moves import KEPT_S
from ownerserve.router.hot_prefixes import HotPrefixes, PrefixCopy
from ownerserve.router.messages import Dispatch, Failed, Failure, Reported, SessionEnd, Stamped
from ownerserve.router.policies import make_policy
from ownerserve.router.settings import Settings
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, Worker
from tests.support.router.fleets import ABLE, SPEED, dispatched, raise_up, served, status

PARENT = SessionId("parent")
SETTINGS = Settings(hot_ms=100.0, hot_ratio=2.0, cool_s=30.0)
CONTEXT = 200_000
WAY_MS = 1000.0 + CONTEXT / 5000
"""To bring that much; two seconds to compute it anew."""
FAR = replace(SPEED, media={**SPEED.media, Tier.PEER: Medium(1000.0, 5e6)})
PROFILE = replace(ABLE, speed=FAR, lends=frozenset({Tier.DEVICE}), spec_digest="d")
HOT = 50_000
"""Half a second: too little to wait a second for state; three forks' pay for the way."""


class Play:
    """A router over so many workers, which has served a turn of the parent."""

    def __init__(self, workers: int = 2, *, profile: Profile = PROFILE) -> None:
        self.state = RouterState(make_policy("ownerserve", SETTINGS), settings=SETTINGS)
        self.hot = HotPrefixes(self.state)
        raise_up(self.state, *(f"w{n}" for n in range(workers)), profile=profile)
        self.home = served(self.state, PARENT, 1.0, tokens=CONTEXT).worker
        self._forks = 0

    def loaded(self, name: WorkerId, now: float, *, pending: int, free: int = 50 << 30) -> None:
        self.state.handle(Stamped(status(str(name), now, pending=pending, free=free)), now)

    def worker(self, name: WorkerId) -> Worker:
        (found,) = [one for one in self.state.fleet if one.id == name]
        return found

    def others(self) -> list[WorkerId]:
        return [one.id for one in self.state.fleet if one.id != self.home]

    def fork(self, now: float, *, tail: int = 500) -> Dispatch:
        """A new fork, as the gateway sends it."""
        self._forks += 1
        tokens = CONTEXT + tail
        sent = dispatched(
            self.state, f"fork-{self._forks}", now, prompt_bytes=4 * tokens, parent=PARENT
        )
        self.hot.sent(sent, now)
        return sent

    def hot_forks(self, count: int, now: float) -> None:
        """So many forks that run at the busy holder, since their prefix is far."""
        self.loaded(self.home, now, pending=HOT)
        for _ in range(count):
            sent = self.fork(now)
            assert (sent.worker, sent.reason) == (self.home, DispatchReason.FORK)
            assert isinstance(sent.decision.wanted, Replica)

    def granted(self, now: float = 3.1) -> PrefixCopy:
        self.hot_forks(3, 3.0)
        (copy,) = self.hot.look(now)
        return copy


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_prefix_is_copied_once_its_forks_would_be_spared_more_than_its_way_takes(
    play: Play,
) -> None:
    play.hot_forks(2, 3.0)
    assert play.hot.look(3.1) == [], f"half a second twice, for {WAY_MS} ms"
    play.hot_forks(1, 3.2)
    (copy,) = play.hot.look(3.3)
    assert (copy.session, copy.source.id, [copy.target.id]) == (PARENT, play.home, play.others())
    assert copy.tokens == CONTEXT + 10, "prompt and answer"
    assert play.hot.look(3.4) == [], "it is under way"

    assert copy.target.unit is not None
    told = Reported(copy.target.unit, Tier.DEVICE, None, copy.tokens, PARENT)
    play.state.handle(told, 4.0)
    play.hot.made(PARENT, 7)
    play.loaded(play.home, 4.0, pending=HOT)
    next_one = play.fork(4.1)
    assert (next_one.worker, next_one.reason) == (copy.target.id, DispatchReason.FORK)
    assert next_one.decision.action is PlacementAction.COLOCATED_PREFILL
    assert next_one.prefill_tokens == 490, "its tail alone"
    assert play.hot.counts == {"wanted": 3, "granted": 1, "made": 1}
    assert play.hot.moved_bytes == 7


def test_who_owns_the_parent_goes_on_owning_it(play: Play) -> None:
    copy = play.granted()
    assert copy.target.unit is not None
    told = Reported(copy.target.unit, Tier.DEVICE, None, copy.tokens, PARENT)
    play.state.handle(told, 4.0)
    play.hot.made(PARENT, 0)
    parent = play.state.sessions.get(PARENT)
    assert parent is not None and parent.live_owner is copy.source
    play.loaded(play.home, 4.5, pending=0)
    later = dispatched(play.state, PARENT, 5.0, prompt_bytes=4 * (CONTEXT + 100))
    assert (later.worker, later.reason) == (play.home, DispatchReason.OWNER)


def test_forks_of_a_calm_holder_want_none(play: Play) -> None:
    play.loaded(play.home, 3.0, pending=0)
    for _ in range(100):
        sent = play.fork(3.0, tail=1)
        play.state.handle(Failed(sent.receipt, Failure.REFUSED), 3.0)
    assert play.hot.look(3.1) == []


def test_a_holder_that_is_calm_again_keeps_its_prefix_to_itself(play: Play) -> None:
    play.hot_forks(3, 3.0)
    play.loaded(play.home, 3.1, pending=0)
    assert play.hot.look(3.2) == [] and len(play.hot) == 1
    play.loaded(play.home, 3.3, pending=HOT)
    assert len(play.hot.look(3.4)) == 1


def test_a_fork_that_brings_its_prefix_with_it_wants_none() -> None:
    """It leaves a replica there by itself."""
    play = Play(profile=replace(PROFILE, speed=SPEED))  # 40 ms away
    play.loaded(play.home, 3.0, pending=HOT)
    sent = play.fork(3.0)
    assert sent.worker != play.home
    assert sent.decision.action is PlacementAction.ARTIFACT_FETCH
    assert sent.decision.wanted is None and not len(play.hot)


def test_of_workers_that_lend_nothing_none_is_wanted() -> None:
    play = Play(profile=replace(PROFILE, lends=frozenset()))
    play.loaded(play.home, 3.0, pending=HOT)
    assert play.fork(3.0).decision.wanted is None


def waits_a_minute(play: Play) -> None:
    play.hot.look(3.0 + KEPT_S + 0.1)


def ends(play: Play) -> None:
    play.state.handle(SessionEnd(PARENT), 3.1)
    play.hot.look(3.2)


@pytest.mark.parametrize(("then", "why"), [(waits_a_minute, "cooled"), (ends, "ended")])
def test_what_is_wanted_no_more_is_dropped(
    play: Play, then: Callable[[Play], None], why: str
) -> None:
    play.hot_forks(1, 3.0)
    then(play)
    assert not len(play.hot) and play.hot.counts[why] == 1


def test_it_goes_where_there_is_room_for_it(play: Play) -> None:
    play.hot_forks(3, 3.0)
    (other,) = play.others()
    play.loaded(other, 3.1, pending=0, free=100 << 20)
    assert play.hot.look(3.2) == [], "100 MiB for 200 MB"
    play.loaded(other, 3.3, pending=0)
    assert len(play.hot.look(3.4)) == 1


def test_what_could_not_be_made_is_not_asked_for_again_for_a_minute(play: Play) -> None:
    play.granted()
    play.hot.missed(PARENT, "not_brought", 3.2)
    for now in (4.0, 30.0, 63.0):
        play.hot_forks(3, now)
        assert play.hot.look(now) == []
    play.hot_forks(3, 63.5)
    assert len(play.hot.look(63.5)) == 1
    assert play.hot.counts["not_brought"] == 1


def test_it_is_read_from_its_owner_though_a_fork_left_one_elsewhere() -> None:
    """Where forks alone ran, nobody knows the parent by its name."""
    play = Play(3)
    first, last = play.others()
    for name in (play.home, last):
        play.loaded(name, 1.9, pending=10**6)
    assert served(play.state, "early", 2.0, tokens=CONTEXT + 500, parent=PARENT).worker == first
    play.loaded(first, 3.5, pending=HOT)
    play.loaded(play.home, 3.5, pending=2 * HOT)
    play.loaded(last, 3.5, pending=0)
    for _ in range(3):
        sent = play.fork(3.5)
        assert sent.worker == first and isinstance(sent.decision.wanted, Replica)
        assert sent.decision.wanted.source.id == first
    (copy,) = play.hot.look(3.6)
    assert (copy.source.id, copy.target.id) == (play.home, last)


def test_what_is_wished_is_copied_for_no_gain(play: Play) -> None:
    (other,) = play.others()
    target = play.worker(other)
    play.hot.ask_for(PARENT, target)
    (copy,) = play.hot.look(3.0)
    assert (copy.source.id, copy.target.id, copy.tokens) == (play.home, other, CONTEXT + 10)
    play.hot.ask_for(PARENT, target)
    assert play.hot.look(3.1) == [], "it is under way"
    assert target.unit is not None
    play.state.handle(Reported(target.unit, Tier.DEVICE, None, copy.tokens, PARENT), 4.0)
    play.hot.made(PARENT, 7)
    play.hot.ask_for(PARENT, target)
    assert play.hot.look(4.1) == [], "it is there"
    assert play.hot.counts == {"granted": 1, "made": 1}


def wished_of_nobody(play: Play) -> None:
    (other,) = play.others()
    play.hot.ask_for(SessionId("unknown"), play.worker(other))


def wished_where_it_lies(play: Play) -> None:
    play.hot.ask_for(PARENT, play.worker(play.home))


def wished_where_there_is_no_room(play: Play) -> None:
    (other,) = play.others()
    play.loaded(other, 2.9, pending=0, free=100 << 20)
    play.hot.ask_for(PARENT, play.worker(other))


def wished_where_none_could_be_made(play: Play) -> None:
    (other,) = play.others()
    play.hot.missed(PARENT, "not_brought", 2.9)
    play.hot.ask_for(PARENT, play.worker(other))


@pytest.mark.parametrize(
    "wish",
    [
        wished_of_nobody,
        wished_where_it_lies,
        wished_where_there_is_no_room,
        wished_where_none_could_be_made,
    ],
)
def test_a_wish_that_cannot_be_met_is_passed_over(play: Play, wish: Callable[[Play], None]) -> None:
    wish(play)
    assert play.hot.look(3.0) == []
    assert play.hot.look(3.1) == []


def test_who_lends_nothing_is_given_none() -> None:
    play = Play(profile=replace(PROFILE, lends=frozenset()))
    (other,) = play.others()
    play.hot.ask_for(PARENT, play.worker(other))
    assert play.hot.look(3.0) == []
