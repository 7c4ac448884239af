"""A session whose turn stayed at a busy worker, since bringing its state would have kept the turn
waiting, moves in the gap behind it; or the move is wanted no more, and dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.decision import DispatchReason
from ownerserve.router.gap_moves import AT_ONCE, KEPT_S, QUEUED_MAX, GapMove, GapMoves
from ownerserve.router.messages import (
    Arm,
    Dispatch,
    Done,
    Down,
    FirstByte,
    SessionEnd,
    Stamped,
    TakenOver,
    WorkerDown,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.settings import Settings
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker
from tests.support.router.fleets import ABLE, SPEED, dispatched, raise_up, served, status

AGENT = SessionId("agent")
SETTINGS = Settings(hot_ms=100.0, hot_ratio=2.0, cool_s=30.0)
FAR = replace(SPEED, media={**SPEED.media, Tier.PEER: Medium(1000.0, 5e6)})
PROFILE = replace(ABLE, speed=FAR, lends=frozenset({Tier.DEVICE}), spec_digest="d")
"""A second to bring anything; two to compute the context anew."""
CONTEXT = 200_000
HOT = 50_000  # half a second: too little to wait a second for state


class Play:
    """A router over two workers, or so many, and its queue of moves."""

    def __init__(self, workers: int = 2) -> None:
        self.state = RouterState(make_policy("ownerserve", SETTINGS), settings=SETTINGS)
        self.moves = GapMoves(self.state, lambda name: Arm.MAIN)
        raise_up(self.state, *(f"w{n}" for n in range(workers)), profile=PROFILE)
        self.moves.look(0.0)

    def worker(self, name: WorkerId | str) -> Worker:
        (found,) = [one for one in self.state.fleet if one.id == name]
        return found

    def loaded(self, name: WorkerId, now: float, *, pending: int, free: int = 50 << 30) -> None:
        self.state.handle(Stamped(status(str(name), now, pending=pending, free=free)), now)

    def sent(self, session: SessionId, now: float, tokens: int = CONTEXT + 500) -> Dispatch:
        """The session's next turn, as the gateway sends it."""
        turn = dispatched(self.state, session, now, prompt_bytes=4 * tokens)
        self.moves.sent(turn, now)
        return turn

    def done(self, turn: Dispatch, now: float) -> None:
        self.state.handle(FirstByte(turn.receipt), now)
        self.state.handle(Done(turn.receipt, Usage(CONTEXT + 500, 10, CONTEXT)), now)
        self.state.check()

    def idle_at_hot(self, session: SessionId = AGENT, *, tokens: int = CONTEXT) -> WorkerId:
        """A session whose turn stayed at its busy worker, and has ended there at 4 s."""
        home = served(self.state, session, 1.0, tokens=tokens).worker
        self.loaded(home, 2.5, pending=HOT)
        turn = self.sent(session, 3.0, tokens + 500)
        assert (turn.worker, turn.decision.reason) == (home, DispatchReason.HOT_TOO_DEAR)
        assert turn.decision.wanted is not None
        self.done(turn, 4.0)
        self.loaded(home, 4.0, pending=HOT)
        return home


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_turn_that_stays_for_the_way_alone_has_its_session_move_behind_it(play: Play) -> None:
    home = served(play.state, AGENT, 1.0, tokens=CONTEXT).worker
    play.loaded(home, 2.5, pending=HOT)
    turn = play.sent(AGENT, 3.0)
    assert (turn.worker, turn.decision.reason) == (home, DispatchReason.HOT_TOO_DEAR)
    assert play.moves.look(3.1) == [], "its turn runs"
    play.done(turn, 4.0)
    play.loaded(home, 4.0, pending=HOT)
    (granted,) = play.moves.look(4.1)
    assert (granted.session, granted.source.id) == (AGENT, home)
    assert granted.target is not granted.source and granted.target.unit is not None
    assert play.moves.look(4.2) == []

    play.state.handle(TakenOver(AGENT, granted.target.unit, home, CONTEXT), 5.0)
    play.moves.taken(AGENT, 5.0)
    assert play.moves.counts == {"wanted": 1, "granted": 1, "taken": 1}
    play.loaded(granted.target.id, 5.5, pending=2 * HOT)
    play.loaded(home, 5.5, pending=0)
    there = play.sent(AGENT, 6.0)
    assert (there.worker, there.decision.cached_tokens) == (granted.target.id, CONTEXT)
    assert there.decision.reason is DispatchReason.HOT_COOLING, "T_cool runs from the move on"


def test_a_calm_owner_keeps_its_sessions_until_it_is_busy_again(play: Play) -> None:
    home = play.idle_at_hot()
    play.loaded(home, 5.0, pending=0)
    assert play.moves.look(5.1) == [] and len(play.moves) == 1
    play.loaded(home, 6.0, pending=HOT)
    assert [one.session for one in play.moves.look(6.1)] == [AGENT]


def turn_more(play: Play, home: WorkerId) -> None:
    play.loaded(home, 5.0, pending=0)
    play.done(play.sent(AGENT, 5.0), 5.5)
    play.loaded(home, 5.6, pending=HOT)


def elsewhere(play: Play, home: WorkerId) -> None:
    (other,) = {"w0", "w1"} - {str(home)}
    unit = play.worker(other).unit
    assert unit is not None
    play.state.handle(TakenOver(AGENT, unit, home, 0), 5.0)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (turn_more, "went_on"),
        (elsewhere, "moved"),
        (lambda play, home: play.state.handle(SessionEnd(AGENT), 5.0), "ended"),
        (lambda play, home: play.state.handle(WorkerDown(home, Down.DRAINED), 5.0), "owner_gone"),
        (lambda play, home: raise_up(play.state, home, profile=PROFILE, life=2), "owner_gone"),
    ],
    ids=["turn", "moved", "ended", "drained", "new life"],
)
def test_a_wanted_move_goes_with_what_it_was_about(
    play: Play, then: Callable[[Play, WorkerId], object], why: str
) -> None:
    then(play, play.idle_at_hot())
    assert play.moves.look(6.0) == [] and len(play.moves) == 0
    assert play.moves.counts == {"wanted": 1, why: 1}


def test_a_wanted_move_lasts_for_a_minute_in_which_no_turn_comes(play: Play) -> None:
    home = play.idle_at_hot()
    play.loaded(home, 5.0, pending=0)
    assert play.moves.look(4.0 + KEPT_S) == [] and len(play.moves) == 1
    play.loaded(home, 6.0 + KEPT_S, pending=HOT)
    assert play.moves.look(6.0 + KEPT_S) == []
    assert play.moves.counts == {"wanted": 1, "too_old": 1}


def crowd(play: Play, contexts: dict[str, int], *, new: int = 500) -> list[SessionId]:
    """Sessions that all live at w0, which is busy, each of which would be better at w1."""
    play.state.handle(WorkerDown(WorkerId("w1"), Down.DRAINED), 0.5)
    names = [SessionId(name) for name in contexts]
    for name, tokens in contexts.items():
        served(play.state, name, 1.0, tokens=tokens)
    raise_up(play.state, "w1", profile=PROFILE)
    for number, name in enumerate(names):
        play.loaded(WorkerId("w0"), 3.0 + number, pending=HOT)
        tokens = contexts[name] + new
        turn = play.sent(name, 3.0 + number, tokens)
        assert turn.decision.reason is DispatchReason.HOT_TOO_DEAR
        play.state.handle(FirstByte(turn.receipt), 3.1 + number)
        play.state.handle(Done(turn.receipt, Usage(tokens, 10, contexts[name])), 3.2 + number)
    play.loaded(WorkerId("w0"), 10.0, pending=HOT)
    return names


def arrive(play: Play, granted: list[GapMove], now: float) -> None:
    for move in granted:
        assert move.target.unit is not None
        play.state.handle(TakenOver(move.session, move.target.unit, move.source.id, CONTEXT), now)
        play.moves.taken(move.session, now)


def test_who_gains_most_for_each_byte_goes_first_and_few_at_once(play: Play) -> None:
    names = crowd(play, {"large": 300_000, "small": 120_000, "middle": 200_000})
    granted = play.moves.look(10.1)
    assert [one.session for one in granted] == ["small", "middle"]
    assert len(granted) == AT_ONCE and play.moves.look(10.2) == []
    play.moves.stayed(names[1], "stale_version")
    assert [one.session for one in play.moves.look(10.3)] == ["large"]
    assert play.moves.counts["stale_version"] == 1


def test_a_flock_does_not_make_the_next_worker_hot(play: Play) -> None:
    """Half a second is spared at first; each that comes will take 0.2 s there."""
    crowd(play, {f"agent{n}": CONTEXT for n in range(5)}, new=20_000)
    arrive(play, play.moves.look(10.1), 11.0)
    arrive(play, play.moves.look(11.1), 12.0)
    assert play.moves.counts["taken"] == 3 and play.moves.look(12.1) == []
    # One has its next turn: from then on its load is counted there, not foretold.
    came = [one.id for one in play.state.fleet if one.id == "w1"]
    moved = [
        name for name, one in play.state.sessions.items() if one.owner and one.owner.id in came
    ]
    turn = play.sent(moved[0], 13.0, CONTEXT + 20_500)
    assert turn.worker == "w1"
    play.done(turn, 14.0)
    assert len(play.moves.look(14.1)) == 1


def test_nobody_moves_where_there_is_no_room(play: Play) -> None:
    home = play.idle_at_hot()
    (other,) = {"w0", "w1"} - {str(home)}
    play.loaded(WorkerId(other), 5.0, pending=0, free=1 << 20)
    assert play.moves.look(5.1) == [] and len(play.moves) == 1
    play.loaded(WorkerId(other), 6.0, pending=0)
    assert len(play.moves.look(6.1)) == 1


def test_who_takes_no_state_over_gets_nothing(play: Play) -> None:
    home = play.idle_at_hot()
    (other,) = {"w0", "w1"} - {str(home)}
    stays = replace(PROFILE, actions=PROFILE.actions - {PlacementAction.STATE_MIGRATION})
    raise_up(play.state, other, profile=stays)
    assert play.moves.look(5.0) == [] and len(play.moves) == 1


def test_who_joins_is_given_what_gains_by_it_and_nothing_of_a_calm_fleet() -> None:
    play = Play(workers=1)
    home = WorkerId("w0")
    for name in ("one", "other"):
        served(play.state, name, 1.0, tokens=CONTEXT)
    raise_up(play.state, "w1", profile=PROFILE)
    assert play.moves.look(3.0) == [] and len(play.moves) == 0
    play.loaded(home, 5.0, pending=HOT)
    granted = play.moves.look(5.1)
    assert {one.session for one in granted} == {"one", "other"}
    assert {one.target.id for one in granted} == {"w1"}


def test_who_was_there_before_is_given_nothing_unasked() -> None:
    play = Play()
    home = served(play.state, AGENT, 1.0, tokens=CONTEXT).worker
    play.loaded(home, 5.0, pending=HOT)
    assert play.moves.look(5.1) == [] and len(play.moves) == 0


def test_the_queue_is_bounded(play: Play) -> None:
    play.state.handle(WorkerDown(WorkerId("w1"), Down.DRAINED), 0.5)
    for number in range(QUEUED_MAX + 5):
        served(play.state, f"agent{number}", 1.0, tokens=120_000 + number)
    raise_up(play.state, "w1", profile=PROFILE)
    play.loaded(WorkerId("w0"), 3.0, pending=HOT)
    for number in range(QUEUED_MAX + 5):
        turn = play.sent(SessionId(f"agent{number}"), 3.0, 120_500 + number)
        play.state.handle(FirstByte(turn.receipt), 3.0)
        play.state.handle(Done(turn.receipt, Usage(120_500 + number, 10, 0)), 3.0)
    assert len(play.moves) == QUEUED_MAX and play.moves.counts["crowded_out"] == 5
