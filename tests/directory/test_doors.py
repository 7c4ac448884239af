"""A unit behind its doors: what is refused, what is void, what is told before a session leaves."""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.directory.owner.doors import Doors, GuardedOwner
from ownerserve.directory.owner.state import Ask, Asks, OwnerState, SessionTip
from ownerserve.directory.port import SWEEP_IDLE_S
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.refusals import WorkerRefusal

S1, S2 = SessionId("s1"), SessionId("s2")
LEASE_S = 30.0
TERM = Term(1, 1)


def unit(name: str) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), 0, Incarnation(1))


A, B, C = unit("a"), unit("b"), unit("c")


def tip(turns: int) -> SessionTip:
    return SessionTip(PrefixHash(bytes([turns]) * 32), 16 * turns)


class Fleet:
    """Units and one directory, which answers what is delivered, in the order that a test wants."""

    def __init__(self, *units: RoutingUnit) -> None:
        self.now_s = 0.0
        self.state = DirectoryState(TERM, lease_s=LEASE_S, open_at_s=0.0)
        self.units = {one: GuardedOwner(OwnerState(one)) for one in units}
        for one in units:
            self.deliver(one, self.units[one].owner.tick(0.0))

    def deliver(self, who: RoutingUnit, asks: Asks) -> None:
        while asks:
            told = [(one, self.state.handle(one.request, self.now_s)) for one in asks]
            asks = []
            for one, outcome in told:
                asks += self.units[who].answered(one, outcome, self.now_s)

    def turn(self, who: RoutingUnit, number: int, *, epoch: Epoch | None = None) -> None:
        self.deliver(who, self.units[who].came(S1, self.now_s, epoch=epoch))
        self.deliver(who, self.units[who].left(S1, tip(number), self.now_s))

    def rest(self, who: RoutingUnit, seconds: float) -> None:
        """Nothing happens for so long; then a frame goes."""
        self.now_s += seconds
        one = self.units[who]
        self.deliver(who, [*one.owner.tick(self.now_s), *one.along(self.now_s)])

    def long_after(self, who: RoutingUnit) -> None:
        """Its last turn is so long ago that nothing is asked for because of that."""
        for _ in range(10):
            self.rest(who, LEASE_S / 3)

    def epoch(self, who: RoutingUnit) -> Epoch:
        return self.units[who].owner.grants[S1].epoch

    def record(self) -> ask.SessionIs:
        found = self.state.handle(ask.FindSession(S1), self.now_s)
        assert isinstance(found, ask.SessionIs)
        return found

    def release(self, who: RoutingUnit, epoch: Epoch, target: RoutingUnit) -> WorkerRefusal | None:
        leaving = self.units[who].release(S1, epoch, target, now_s=self.now_s)
        if isinstance(leaving, WorkerRefusal):
            return leaving
        self.deliver(who, leaving)
        return None


def test_a_session_moves_there_and_back_and_its_version_never_goes_back() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    first = fleet.epoch(A)
    assert fleet.release(A, first, B) is None
    assert (fleet.record().owner, fleet.record().version) == (B, 1)
    fleet.turn(A, 9)  # a guest's
    assert fleet.record().version == 1
    fleet.turn(B, 2)
    assert fleet.record().version == 2
    second = fleet.epoch(B)
    assert fleet.release(A, first, B) is WorkerRefusal.STALE_EPOCH
    assert fleet.release(B, second, A) is None
    fleet.turn(A, 3)
    assert (fleet.record().owner, fleet.record().version) == (A, 3)
    assert fleet.release(A, second, B) is WorkerRefusal.STALE_EPOCH
    assert fleet.units[A].owner.refused == {("release", "stale_epoch"): 2}


def test_who_owns_nothing_hands_nothing_over() -> None:
    fleet = Fleet(A, B, C)
    fleet.turn(A, 1)
    assert fleet.release(B, fleet.epoch(A), C) is WorkerRefusal.NOT_OWNER
    assert fleet.release(A, fleet.epoch(A), A) is WorkerRefusal.WRONG_TARGET
    fleet.now_s = LEASE_S
    assert fleet.release(A, fleet.epoch(A), B) is WorkerRefusal.NOT_OWNER


def test_a_turn_that_was_not_told_yet_goes_along() -> None:
    """One report is under way and lost, one waits behind it: the target goes on from both."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    owner = fleet.units[A]
    assert owner.left(S1, tip(2), fleet.now_s)  # and lost
    assert owner.left(S1, tip(3), fleet.now_s) == []
    assert fleet.release(A, fleet.epoch(A), B) is None
    found = fleet.record()
    assert (found.owner, found.version, found.tokens) == (B, 3, 48)


def test_a_hand_over_that_overtakes_its_report_waits_for_it() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    owner = fleet.units[A]
    late = owner.left(S1, tip(2), fleet.now_s)
    asks = owner.release(S1, fleet.epoch(A), B, now_s=fleet.now_s)
    assert isinstance(asks, list)
    fleet.deliver(A, asks[-1:])
    assert fleet.record().owner == A
    fleet.deliver(A, late)
    fleet.now_s = 1.0
    fleet.deliver(A, owner.owner.tick(fleet.now_s))
    assert (fleet.record().owner, fleet.record().version) == (B, 2)


def test_who_cannot_hand_over_owns_again() -> None:
    fleet = Fleet(A)
    fleet.turn(A, 1)
    first = fleet.epoch(A)
    assert fleet.release(A, first, B) is None  # it is not there
    assert fleet.epoch(A) > first and fleet.record().version == 1
    assert fleet.units[A].owner.refused == {("hand_over", "target_not_live"): 1}


def test_a_directory_that_is_silent_makes_a_guest_that_asks_on() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    owner = fleet.units[A]
    assert owner.release(S1, fleet.epoch(A), B, now_s=0.0)  # and lost
    assert owner.owner.may_serve(S1, 0.0) is None
    fleet.now_s = 2.0
    fleet.deliver(A, owner.owner.tick(2.0))
    assert fleet.record().owner == B


def test_a_later_epoch_in_a_turns_line_voids_the_own_grant() -> None:
    fleet = Fleet(A)
    fleet.turn(A, 1)
    fleet.deliver(A, fleet.units[A].came(S2, 0.0))
    later = fleet.units[A].owner.grants[S2].epoch  # some epoch that was issued since
    fleet.units[A].hear(S1, later)
    assert fleet.units[A].owner.may_serve(S1, 0.0) is None
    assert fleet.units[A].owner.refused == {("grant", "stale_epoch"): 1}
    fleet.turn(A, 2, epoch=later)  # binds anew, above what was heard
    assert fleet.epoch(A) > later


def test_a_grant_that_comes_late_is_void() -> None:
    """A later owner was heard of while the answer to Bind was on its way."""
    fleet = Fleet(A)
    (bind,) = fleet.units[A].came(S1, 0.0)
    fleet.units[A].hear(S1, Epoch(TERM, 99))
    fleet.units[A].answered(bind, fleet.state.handle(bind.request, 0.0), 0.0)
    assert fleet.units[A].owner.may_serve(S1, 0.0) is None


def test_the_word_of_who_slept_is_refused_and_counted() -> None:
    fleet = Fleet(A, B)
    sessions = [SessionId(f"s{n}") for n in range(3)]
    a, epochs = fleet.units[A], {}
    for one in sessions:
        fleet.deliver(A, a.came(one, 0.0))
        epochs[one] = a.owner.grants[one].epoch
    late = a.left(sessions[0], tip(1), 0.0)
    leaving = a.release(sessions[1], epochs[sessions[1]], B, now_s=0.0)
    assert isinstance(leaving, list)
    late += leaving + a.over(sessions[2], 0.0)
    fleet.now_s = LEASE_S + 1.0
    fleet.deliver(B, fleet.units[B].owner.tick(fleet.now_s))
    for one in sessions:
        fleet.deliver(B, fleet.units[B].came(one, fleet.now_s))
    fleet.deliver(A, late)
    by_the_directory = (
        ("advance", "stale_epoch"), ("hand_over", "stale_epoch"), ("end", "not_owner"),
    )  # fmt: skip
    by_its_own_clock = [(verb, "lease_over") for verb in ("advance", "hand_over", "end")]
    expected = dict.fromkeys([*by_the_directory, *by_its_own_clock, ("grant", "stale_epoch")], 1)
    assert a.owner.refused == expected
    for one in sessions:
        assert fleet.units[B].owner.may_serve(one, fleet.now_s)


def test_a_session_that_ends_before_it_is_bound_ends() -> None:
    fleet = Fleet(A)
    asks = fleet.units[A].came(S1, 0.0)
    fleet.units[A].left(S1, tip(1), 0.0)
    assert fleet.units[A].over(S1, 0.0) == []
    fleet.deliver(A, asks)
    assert isinstance(fleet.state.handle(ask.FindSession(S1), 0.0), ask.Miss)


def test_what_a_directory_gives_below_what_was_heard_is_asked_for_again() -> None:
    """It lost its memory and its term file: until who owns the session asks, nobody else can."""
    fleet = Fleet(A, B)
    heard = Epoch(Term(2, 7), 5)
    guarded = fleet.units[A]
    asks = guarded.came(S1, 0.0)
    guarded.hear(S1, heard)
    first = [(one, fleet.state.handle(one.request, 0.0)) for one in asks]
    (again,) = [one for asked in first for one in guarded.answered(*asked, 0.0)]
    assert again.request == ask.Bind(S1, A, seen=heard)
    assert fleet.record().owner == A and S1 not in guarded.owner.grants
    assert fleet.state.is_behind(again.request)
    fleet.state.start_term(Term(3, 1), open_at_s=0.0)
    fleet.deliver(A, [again])
    assert fleet.epoch(A) == fleet.record().epoch > heard


def test_what_is_adopted_below_what_was_heard_is_asked_for_again() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.state = DirectoryState(Term(1, 2), lease_s=LEASE_S, open_at_s=LEASE_S)
    fleet.now_s = LEASE_S / 3
    guarded = fleet.units[A]
    (renewal,) = guarded.owner.tick(fleet.now_s)
    refused = fleet.state.handle(renewal.request, fleet.now_s)
    (register,) = guarded.answered(renewal, refused, fleet.now_s)
    guarded.hear(S1, Epoch(Term(2, 7), 5))
    fleet.deliver(A, [register])
    assert fleet.record().owner == A and S1 not in guarded.owner.grants
    fleet.state.start_term(Term(3, 1), open_at_s=fleet.now_s)
    fleet.rest(A, 2 * LEASE_S / 3)  # for so long it said that it is being rebuilt
    assert fleet.epoch(A) == fleet.record().epoch


def published_anew(fleet: Fleet) -> tuple[Ask, ask.Outcome]:
    """The directory forgets, and adopts what A tells of its inventory; the answer is on its way."""
    fleet.turn(A, 1)
    fleet.state = DirectoryState(Term(2, 1), lease_s=LEASE_S, open_at_s=LEASE_S)
    fleet.now_s = LEASE_S / 3
    guarded = fleet.units[A]
    (renewal,) = guarded.owner.tick(fleet.now_s)
    refused = fleet.state.handle(renewal.request, fleet.now_s)
    (register,) = guarded.answered(renewal, refused, fleet.now_s)
    leased = fleet.state.handle(register.request, fleet.now_s)
    (publish,) = guarded.answered(register, leased, fleet.now_s)
    return publish, fleet.state.handle(publish.request, fleet.now_s)


def test_what_was_adopted_and_heard_of_too_late_is_asked_for_again() -> None:
    """The lease that covered it is over; the record names its owner of before, which is there."""
    fleet = Fleet(A)
    publish, adopted = published_anew(fleet)
    epoch = fleet.record().epoch
    fleet.now_s = LEASE_S + 1.0
    fleet.deliver(A, fleet.units[A].answered(publish, adopted, fleet.now_s))
    assert fleet.epoch(A) == fleet.record().epoch > epoch


def test_what_was_being_adopted_as_the_unit_fell_asleep_is_asked_for_again() -> None:
    fleet = Fleet(A)
    published_anew(fleet)
    epoch = fleet.record().epoch
    fleet.rest(A, 2 * LEASE_S)
    assert fleet.epoch(A) == fleet.record().epoch > epoch


def test_what_is_not_adopted_as_the_own_record_is_later_is_asked_for() -> None:
    """A Bind that was long on its way was taken by the new memory, under an epoch of its own."""
    fleet = Fleet(A)
    fleet.turn(A, 1)
    fleet.state = DirectoryState(Term(2, 1), lease_s=LEASE_S, open_at_s=0.0)
    fleet.now_s = LEASE_S / 3
    for late in (ask.Register(A), ask.Bind(S1, A)):
        fleet.state.handle(late, fleet.now_s)
    fleet.rest(A, 0.0)
    assert fleet.epoch(A) == fleet.record().epoch


def test_a_report_that_finds_the_own_record_under_another_epoch_binds_anew() -> None:
    """A Bind that was long on its way was taken by a directory without memory."""
    fleet = Fleet(A)
    fleet.turn(A, 1)
    fleet.state = DirectoryState(Term(0, 1), lease_s=LEASE_S, open_at_s=0.0)
    for late in (ask.Register(A), ask.Bind(S1, A)):
        fleet.state.handle(late, 0.0)
    fleet.state.start_term(Term(3, 1), open_at_s=0.0)
    fleet.turn(A, 2)
    assert fleet.epoch(A) == fleet.record().epoch


def test_doors_are_bounded_and_forget_who_was_heard_of_longest_ago() -> None:
    doors = Doors(sessions_max=2)
    for name, counter in ((S1, 5), (S2, 6), (S1, 4), (SessionId("s3"), 7)):
        doors.hear(name, Epoch(TERM, counter))
    assert len(doors) == 2
    assert doors.above(S1, Epoch(TERM, 4)) == Epoch(TERM, 5)
    assert doors.above(S2, Epoch(TERM, 1)) is None


def frames_of(seconds: int, *, turn_each_s: float) -> list[Asks]:
    """What one unit sends in that time under a lease of 30 s, a frame an entry."""
    fleet, frames = Fleet(A), []
    guarded = fleet.units[A]
    fleet.deliver(A, guarded.came(S1, 0.0))
    for tick in range(1, 2 * seconds + 1):
        fleet.now_s = tick * 0.5
        asks = [] if fleet.now_s % turn_each_s else guarded.left(S1, tip(tick % 200), fleet.now_s)
        if asks := [*asks, *guarded.owner.tick(fleet.now_s)]:
            asks += guarded.owner.renewal(fleet.now_s)
            frames.append(asks)
            fleet.deliver(A, asks)
    return frames


def test_an_idle_unit_sends_a_frame_in_ten_seconds() -> None:
    frames = frames_of(300, turn_each_s=1000)
    assert len(frames) == 30
    assert all([type(one.request) for one in frame] == [ask.RenewLease] for frame in frames)


def test_a_frame_that_goes_anyway_renews_the_lease() -> None:
    frames = frames_of(300, turn_each_s=5)
    assert len(frames) == 60
    kinds = [ask.Advance, ask.RenewLease]
    assert all([type(one.request) for one in frame] == kinds for frame in frames)


def test_a_guest_asks_again_along_with_frames_that_go_anyway() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.turn(B, 2)
    guest = fleet.units[B]
    assert [one.request for one in guest.along(0.5)] == []
    fleet.deliver(B, guest.along(1.0))
    assert fleet.release(A, fleet.epoch(A), B) is None
    assert [one for one in guest.along(2.5) if isinstance(one.request, ask.Bind)] == []
    fleet.deliver(B, guest.along(3.0))
    assert fleet.units[B].owner.may_serve(S1, 3.0) is not None
    assert fleet.record().version == 1
    asks = [one for now_s in range(4, 120) for one in guest.along(float(now_s))]
    assert not any(isinstance(one.request, ask.Bind) for one in asks)


def test_a_guest_whose_session_stays_where_it_is_asks_ever_less_often() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.turn(B, 2)
    asked = 0
    for now_s in range(1, 29):
        asks = [*fleet.units[B].owner.tick(float(now_s)), *fleet.units[B].along(float(now_s))]
        asked += sum(isinstance(one.request, ask.Bind) for one in asks)
        fleet.deliver(B, asks)
    assert asked == 4


def test_who_is_said_to_own_what_it_does_not_know_of_asks_for_it() -> None:
    """It was handed the session over, and no turn has come since."""
    fleet = Fleet(A, B, C)
    fleet.turn(A, 1)
    assert fleet.release(A, fleet.epoch(A), B) is None
    told = fleet.record().epoch
    assert fleet.release(B, told, C) is WorkerRefusal.NOT_OWNER
    fleet.deliver(B, fleet.units[B].along(1.0))
    assert fleet.release(B, fleet.epoch(B), C) is None
    assert fleet.record().owner == C


def test_a_turn_that_is_older_than_the_record_moves_nothing() -> None:
    """It ended while its unit asked for the session; an owner came and went meanwhile."""
    fleet = Fleet(A, B)
    asks = fleet.units[A].came(S1, 0.0)
    assert fleet.units[A].left(S1, tip(1), 0.0) == []
    fleet.turn(B, 5)
    assert fleet.release(B, fleet.epoch(B), A) is None
    fleet.deliver(A, asks)
    found = fleet.record()
    assert (found.owner, found.version, found.tokens) == (A, 1, 80)


def test_an_owner_ends_a_session_that_had_no_turn_for_a_day() -> None:
    """While its worker lives nobody else would: its lease is renewed all the time."""
    fleet = Fleet(A)
    fleet.turn(A, 1)
    while fleet.now_s < SWEEP_IDLE_S - LEASE_S:
        fleet.rest(A, LEASE_S / 3)
    fleet.turn(A, 2)
    assert fleet.record().version == 2
    until_s = fleet.now_s + SWEEP_IDLE_S - LEASE_S
    while fleet.now_s < until_s:
        fleet.rest(A, LEASE_S / 3)
    assert fleet.record().version == 2
    fleet.rest(A, LEASE_S - 1.0)
    fleet.rest(A, 1.0)
    assert isinstance(fleet.state.handle(ask.FindSession(S1), fleet.now_s), ask.Miss)
    assert not fleet.units[A].owner.grants
    fleet.turn(A, 3)
    assert fleet.record().version == 1


def test_who_slept_and_was_not_replaced_owns_again_without_a_turn() -> None:
    """The record names it all the while, so nobody else can bind, and no turn may come to it."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.long_after(A)
    epoch = fleet.epoch(A)
    fleet.now_s += 2 * LEASE_S
    fleet.rest(A, 0.0)
    assert fleet.epoch(A) > epoch
    assert (fleet.record().owner, fleet.record().version) == (A, 1)


def test_who_slept_and_was_replaced_owns_nothing() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.now_s = 2 * LEASE_S
    fleet.rest(B, 0.0)
    fleet.turn(B, 2)
    fleet.rest(A, 0.0)
    assert S1 not in fleet.units[A].owner.grants
    assert fleet.record().owner == B


def test_a_hand_over_that_the_end_of_the_lease_cut_off_is_begun_anew() -> None:
    """It never arrived: the record names who gave the session up, and nobody else could bind it."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.long_after(A)
    epoch = fleet.epoch(A)
    assert isinstance(fleet.units[A].release(S1, epoch, B, now_s=fleet.now_s), list)  # and lost
    fleet.now_s += 2 * LEASE_S
    fleet.rest(B, 0.0)
    fleet.rest(A, 0.0)
    assert fleet.record().owner == A
    assert fleet.epoch(A) > epoch


def test_a_hand_over_that_arrived_before_the_lease_ended_stands() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    asks = fleet.units[A].release(S1, fleet.epoch(A), B, now_s=fleet.now_s)
    assert isinstance(asks, list)
    for one in asks:
        fleet.state.handle(one.request, fleet.now_s)  # its answer is lost
    fleet.rest(B, LEASE_S / 2)
    fleet.now_s = 2 * LEASE_S - 1
    fleet.rest(B, 0.0)
    fleet.rest(A, 0.0)
    assert fleet.record().owner == B
    assert S1 not in fleet.units[A].owner.grants


def test_who_gave_a_session_up_and_is_given_it_back_owns_it_without_a_turn() -> None:
    """A gateway's word of an owner's turn came late: its unit was a guest at no time (30622)."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    assert fleet.release(A, fleet.epoch(A), B) is None
    fleet.turn(B, 2)
    assert fleet.release(B, fleet.epoch(B), A) is None
    assert fleet.record().owner == A and S1 not in fleet.units[A].owner.grants
    for _ in range(3):
        fleet.rest(A, LEASE_S / 3)
    assert fleet.epoch(A) == fleet.record().epoch


def test_who_slept_and_is_given_back_what_another_took_owns_it_without_a_turn() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    fleet.now_s = LEASE_S + 1.0
    fleet.rest(B, 0.0)
    fleet.turn(B, 2)
    fleet.rest(A, 0.0)
    assert fleet.release(B, fleet.epoch(B), A) is None
    for _ in range(3):
        fleet.rest(A, LEASE_S / 3)
    assert fleet.epoch(A) == fleet.record().epoch


def test_who_is_taken_for_the_owner_again_and_again_asks_for_the_session_all_the_same() -> None:
    """Each word of a gateway put off for a second what would have made it true (69932)."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    assert fleet.release(A, fleet.epoch(A), B) is None
    assert fleet.record().owner == B  # who has heard nothing of it
    for _ in range(4):
        fleet.now_s += 0.4
        fleet.release(B, fleet.record().epoch, A)
        fleet.rest(B, 0.0)
    assert fleet.epoch(B) == fleet.record().epoch


def test_a_session_on_its_way_to_another_is_not_asked_for() -> None:
    """Asked for without a turn, it would be ours again before the hand-over arrives."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    assert fleet.units[A].release(S1, fleet.epoch(A), B, now_s=fleet.now_s)  # and lost
    along = fleet.units[A].along(2.0)
    assert not any(isinstance(one.request, ask.Bind) for one in along)
    fleet.rest(A, 2.0)
    assert fleet.record().owner == B


def test_a_directory_that_is_being_rebuilt_is_asked_again_when_it_is_over_and_no_sooner() -> None:
    fleet = Fleet(A)
    fleet.state = DirectoryState(TERM, lease_s=LEASE_S, open_at_s=5.0)
    fleet.units[A] = one = GuardedOwner(OwnerState(A))
    fleet.deliver(A, one.owner.tick(0.0))
    fleet.deliver(A, one.came(S1, 0.0))
    for _ in range(19):
        fleet.now_s += 0.25
        assert one.owner.tick(fleet.now_s) == []
    fleet.rest(A, 0.25)
    assert fleet.record().owner == A and fleet.epoch(A) == fleet.record().epoch


def test_an_end_that_the_end_of_the_lease_cut_off_is_asked_for_again() -> None:
    """It never arrived: the record names a living unit, so no sweep would take it."""
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    assert fleet.units[A].over(S1, fleet.now_s)  # and lost
    fleet.now_s = 2 * LEASE_S
    fleet.rest(B, 0.0)
    fleet.rest(A, 0.0)
    assert isinstance(fleet.state.handle(ask.FindSession(S1), fleet.now_s), ask.Miss)
    fleet.turn(B, 2)
    assert fleet.record().owner == B


def test_an_end_that_the_end_of_the_lease_cut_off_ends_nothing_of_another_owner() -> None:
    fleet = Fleet(A, B)
    fleet.turn(A, 1)
    assert fleet.units[A].over(S1, fleet.now_s)  # and lost
    fleet.now_s = LEASE_S + 1.0
    fleet.rest(B, 0.0)
    fleet.turn(B, 2)
    fleet.rest(A, 0.0)
    assert fleet.record().owner == B and S1 in fleet.units[B].owner.grants


def test_a_session_that_goes_on_after_its_end_is_not_ended_with_the_lease() -> None:
    """A turn came after all while the end was on its way, and bound it under a new epoch."""
    fleet = Fleet(A)
    fleet.turn(A, 1)
    assert fleet.units[A].over(S1, fleet.now_s)  # and lost
    fleet.turn(A, 2)
    version = fleet.record().version
    fleet.now_s = 2 * LEASE_S
    fleet.deliver(A, fleet.units[A].owner.tick(fleet.now_s))
    assert fleet.record().version == version and fleet.epoch(A) == fleet.record().epoch
