"""The queue before the fleet holds the turns that may not begin yet, each with whom to tell.

    enter ──> a seat? ──> a running turn's place? ──> go           nothing is set: go at once
    (first turns: SessionAdmission)  (all turns: RunningLimit)
                  any wait ──> turned_away: the queue is full, the deadline is past or can't be met

It is bounded. When it is full, the tenant that has most of it for its weight loses its newest turn
of its least class, the one that comes included: a flood fills what others leave. A turn stands in
it until its deadline (its client's, and `wait_s` for a running turn's place), and is turned away
then, if not before, because by the measured pace it could not begin in time.

Owns who waits and for how long. Where a turn stands in line, and whether it may begin, its gates
decide. Gateway and simulator stand the same queue in front of their routers. Pure: time comes as
`now_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import SessionAdmission, Wait
from ownerserve.router.entry.fair import InLine, Ticket
from ownerserve.router.entry.running import RunningLimit, TurnPace
from ownerserve.router.entry.terms import (
    EnteringTurn,
    LinePlace,
    SessionClass,
    TurnAwayReason,
    TurnedAway,
    TurnWait,
    WaitReason,
)

LOOK_S = 1.0
"""While turns wait for a place, workers may come up: somebody looks so often."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 600.0
STALE_MAX = 1024
"""So many deadlines of turns that no longer wait are kept: who hangs up may have said an hour."""


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """running_max    turns under way for each worker that is up; None: no limit
    waiting_max       turns that wait, for whatever; None: no limit
    wait_s            how long a turn may wait for a running one's place, from when it came: below
                      the 60 s after which proxies and load balancers give up on a silent server
    """

    running_max: int | None = None
    waiting_max: int | None = 256
    wait_s: float = 45.0

    def __post_init__(self) -> None:
        for field in ("running_max", "waiting_max", "wait_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise InvalidInput(field, f"{value}", "use more than 0")


class Entrant(Protocol):
    """An entrant is told what comes of its turn, once."""

    def go(self, now_s: float) -> None:
        """Begin: decide where the turn runs."""
        ...

    def turned_away(self, no: TurnedAway) -> None:
        """End: the turn was not let in."""
        ...


class QueueWatch(Protocol):
    """A queue's watch counts what comes of turns."""

    def let_in(self, turn: EnteringTurn, waited_s: float) -> None:
        """Hear that a turn begins."""
        ...

    def waited(self, wait: TurnWait) -> None:
        """Hear that a turn has waited, and goes on."""
        ...

    def turned_away(self, turn: EnteringTurn, reason: TurnAwayReason) -> None:
        """Hear that a turn was not let in."""
        ...


class HeldTurn:
    """A held turn waits, or did, for `reason`: for a seat (`seat`) or in line for a running turn's
    place. `came`: where it stood in that line at first, since `since_s`; `waited`: what it waited
    for before."""

    __slots__ = (
        "came", "entrant", "one", "reason", "seat", "since_s", "until_s", "waited", "waits",
    )  # fmt: skip

    def __init__(self, one: InLine, entrant: Entrant) -> None:
        self.one = one
        self.entrant = entrant
        self.reason = WaitReason.RUNNING
        self.came = LinePlace(0, 0)
        self.since_s = 0.0
        self.waited: list[TurnWait] = []
        self.seat: Ticket | None = None
        self.until_s = inf
        self.waits = False

    @property
    def turn(self) -> EnteringTurn:
        """The turn that is held."""
        return self.one.turn

    def waits_no_more(self, now_s: float) -> TurnWait:
        """Note, and return, what it waited for until now."""
        wait = TurnWait(self.reason, self.came, now_s - self.since_s)
        self.waited.append(wait)
        return wait


class _Part:
    """A part is what a tenant has of the queue: its turns by class, in the order in which they
    came."""

    __slots__ = ("classes", "count")

    def __init__(self) -> None:
        self.count = 0
        self.classes: dict[SessionClass, dict[Ticket, HeldTurn]] = {}

    def add(self, held: HeldTurn) -> None:
        self.count += 1
        self.classes.setdefault(held.turn.session_class, {})[held.one.ticket] = held

    def discard(self, held: HeldTurn) -> None:
        self.count -= 1
        del self.classes[held.turn.session_class][held.one.ticket]

    def newest_of_least(self) -> HeldTurn:
        """Return the newest turn of the class with the least share of those that wait."""
        newest = (ones[next(reversed(ones))] for ones in self.classes.values() if ones)
        return min(newest, key=lambda held: held.turn.terms.priorities.of(held.turn.session_class))

    def size(self) -> float:
        """Return how much of the queue this is, for the tenant's weight."""
        return self.count / self.newest_of_least().turn.terms.weight


class AdmissionQueue:
    """The queue holds turns until its gates let them in. `running` tells how many turns run."""

    def __init__(
        self,
        seats: SessionAdmission | None,
        slots: RunningLimit | None = None,
        *,
        settings: QueueSettings | None = None,
        running: Callable[[], int] = int,
        watch: QueueWatch | None = None,
    ) -> None:
        self.seats = seats
        self.is_open = seats is None and slots is None
        """Whether every turn goes on at once: nothing limits them."""
        self._slots = slots
        self._settings = settings or QueueSettings()
        self._running = running
        self._watch = watch
        self._pace = TurnPace()
        self._seat_pace = TurnPace()
        """How long one seat takes to come, while anybody waits for one."""
        self._waiting: dict[Ticket, HeldTurn] = {}
        self._seated: dict[Ticket, HeldTurn] = {}
        self._parts: dict[str, _Part] = {}
        self._deadlines: list[tuple[float, Ticket]] = []
        self._issued = 0
        self._is_looking = False

    def __len__(self) -> int:
        """Return how many turns wait."""
        return len(self._waiting)

    def waiting(self) -> list[HeldTurn]:
        """Return the turns that wait, in the order in which they came."""
        return list(self._waiting.values())

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each of them stands in line."""
        found = {} if self._slots is None else self._slots.places()
        if self.seats is not None:
            for seat, place in self.seats.places().items():
                found[self._seated[seat].one.ticket] = place
        return found

    def place(self, held: HeldTurn) -> LinePlace:
        """Return where one who waits stands in line."""
        if held.seat is not None:
            assert self.seats is not None
            return self.seats.place(held.seat)
        assert self._slots is not None
        return self._slots.place(held.one)

    def enter(self, turn: EnteringTurn, entrant: Entrant, *, now_s: float) -> HeldTurn | None:
        """Let the turn in or turn it away at once, and return None; or hold it, until `entrant` is
        told. A client that hangs up gives what is returned to `leave`."""
        if self.is_open:
            entrant.go(now_s)
            return None
        self._issued += 1
        held = HeldTurn(InLine(Ticket(self._issued), turn), entrant)
        if self._slots is not None:
            self._pace.note(self._running(), now_s)
        if self.seats is not None and turn.session is not None:
            answer = self.seats.ask(
                turn.session,
                turn.prompt_tokens,
                parent=turn.parent,
                now_s=now_s,
                tenant=turn.tenant,
                terms=turn.terms,
                session_class=turn.session_class,
                model=turn.model,
                absent_tokens=turn.absent_tokens,
            )
            if isinstance(answer, Wait):
                held.seat, held.reason = answer.ticket, answer.reason
                self._seated[answer.ticket] = held
                self._note_seats(now_s)
                self._hold(held, turn.deadline_s, now_s)
                return held if held.waits else None
        self._line_up(held, now_s)
        return held if held.waits else None

    def leave(self, held: HeldTurn, now_s: float) -> None:
        """Take the turn of a client that hung up out of the queue; its entrant is never called. One
        that no longer waits is no error."""
        if held.waits:
            self._take_out(held, now_s)
            self._note_seats(now_s)
            self._stand_down(held, now_s)

    def ended(self, session: SessionId | None, tokens: int, now_s: float) -> None:
        """Note that a turn is over and let in whom that makes room for; the session's context is
        `tokens` (0: not told)."""
        if self.seats is not None and session is not None:
            self.seats.ended(session, tokens, now_s)
        self._ended(now_s)

    def ended_last(self, session: SessionId, now_s: float) -> None:
        """Note that a session's last turn is over: its seat is free."""
        if self.seats is not None:
            self.seats.over(session)
        self._ended(now_s)

    def over(self, session: SessionId, now_s: float) -> None:
        """Free the seat of a session that is over, and let in whom that makes room for."""
        if self.seats is not None:
            self.seats.over(session)
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """Let in whom there is room for and whose patience is over; turn away who is past its
        deadline."""
        if self._is_looking or not self._waiting:
            return  # what those who are let in make of the room is seen by who looks already
        self._is_looking = True
        try:
            self._expire(now_s)
            while self._let_in(now_s):
                pass
        finally:
            self._is_looking = False

    def next_due_s(self, now_s: float) -> float | None:
        """Return when time alone may let somebody in or turn somebody away; None: never."""
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heappop(self._deadlines)
        dues = [until_s for until_s, _ in self._deadlines[:1]]
        if self.seats is not None and (seat_s := self.seats.next_due_s()) is not None:
            dues.append(seat_s)
        if self._slots is not None and len(self._slots):
            dues.append(now_s + LOOK_S)
        return min(dues, default=None)

    def let_all_in(self, now_s: float) -> None:
        """Tell everyone who waits to go: the router drains, and each is to be refused instead of
        waiting on."""
        for held in list(self._waiting.values()):
            if held.waits:
                self._take_out(held, now_s)
                self._goes_on(held, now_s)
                held.entrant.go(now_s)

    def let_past_seats(self, now_s: float) -> None:
        """Let go on who waits for a seat: seats hold nobody just now."""
        for seat, held in list(self._seated.items()):
            assert self.seats is not None
            self.seats.leave(seat, now_s)
            self._unseat(held, now_s)

    # Steps

    def _ended(self, now_s: float) -> None:
        if self._slots is not None:
            self._pace.note(self._running(), now_s)
            self._pace.ended()
        self.look(now_s)

    def _let_in(self, now_s: float) -> bool:
        """Let one in from the line, and all who have a seat now into it; return whether there was
        anybody."""
        found = False
        for ticket in [] if self.seats is None else self.seats.due(now_s):
            self._unseat(self._seated[ticket], now_s)
            found = True
        ticket_next = None if self._slots is None else self._slots.next()
        if ticket_next is not None:
            held = self._waiting[ticket_next]
            self._forget(held)
            self._goes_on(held, now_s)
            self._go(held, now_s)
            found = True
        return found

    def _unseat(self, held: HeldTurn, now_s: float) -> None:
        """Let go on who waits for a seat no longer."""
        assert held.seat is not None
        del self._seated[held.seat]
        self._note_seats(now_s)
        self._seat_pace.ended()
        held.seat = None
        self._forget(held)
        self._goes_on(held, now_s)
        self._line_up(held, now_s)

    def _goes_on(self, held: HeldTurn, now_s: float) -> None:
        wait = held.waits_no_more(now_s)
        if self._watch is not None:
            self._watch.waited(wait)

    def _line_up(self, held: HeldTurn, now_s: float) -> None:
        """Let in who has a seat, or needs none, or put him in the line for a running turn's
        place."""
        turn, slots = held.turn, self._slots
        if turn.deadline_s <= now_s:
            past = TurnAwayReason.DEADLINE_PAST
            self._turn_away(held, past, self._wait_s(held, now_s), now_s=now_s)
        elif slots is None:
            self._go(held, now_s)
        elif slots.takes(turn):
            slots.charge(turn)
            self._go(held, now_s)
        else:
            until_s = min(turn.deadline_s, turn.came_s + self._settings.wait_s)
            late_s = now_s + self._wait_s(held, now_s) - until_s
            if late_s > 0.0 and until_s > now_s and self._pace.is_measured:
                self._turn_away(held, TurnAwayReason.DEADLINE_UNMET, late_s, now_s=now_s)
            else:
                slots.add(held.one)
                held.reason = WaitReason.RUNNING
                self._hold(held, until_s, now_s)

    def _go(self, held: HeldTurn, now_s: float) -> None:
        if self._watch is not None:
            self._watch.let_in(held.turn, now_s - held.turn.came_s)
        held.entrant.go(now_s)
        if self._slots is not None:
            self._pace.note(self._running(), now_s)

    def _hold(self, held: HeldTurn, until_s: float, now_s: float) -> None:
        """Let one wait who stands in line already; if the queue is full, somebody goes."""
        held.waits, held.until_s = True, until_s
        ticket = held.one.ticket
        self._waiting[ticket] = held
        part = self._parts.get(held.turn.tenant)
        if part is None:
            part = self._parts[held.turn.tenant] = _Part()
        part.add(held)
        held.came, held.since_s = self.place(held), now_s
        if until_s <= now_s:
            self._drop(held, TurnAwayReason.DEADLINE_PAST, now_s)
            return
        if until_s < inf:
            self._note_deadline(until_s, ticket)
        waiting_max = self._settings.waiting_max
        if waiting_max is not None and len(self._waiting) > waiting_max:
            self._drop(self._too_many(), TurnAwayReason.QUEUE_FULL, now_s)

    def _note_deadline(self, until_s: float, ticket: Ticket) -> None:
        """Note until when one waits; forget those of many who have gone."""
        if len(self._deadlines) > 2 * len(self._waiting) + STALE_MAX:
            self._deadlines = [one for one in self._deadlines if one[1] in self._waiting]
            heapify(self._deadlines)
        heappush(self._deadlines, (until_s, ticket))

    def _too_many(self) -> HeldTurn:
        """Return the newest turn of the least class of the tenant that has most of the queue for
        its weight; of those that have as much, whose comes last."""
        return max(reversed(self._parts.values()), key=_Part.size).newest_of_least()

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ticket = heappop(self._deadlines)
            held = self._waiting.get(ticket)
            if held is not None and held.until_s <= now_s:
                self._drop(held, TurnAwayReason.DEADLINE_PAST, now_s)

    def _drop(self, held: HeldTurn, reason: TurnAwayReason, now_s: float) -> None:
        """Turn one away who waits."""
        self._take_out(held, now_s)
        self._note_seats(now_s)
        held.waits_no_more(now_s)
        self._turn_away(held, reason, self._wait_s(held, now_s), now_s=now_s)

    def _turn_away(
        self, held: HeldTurn, reason: TurnAwayReason, retry_after_s: float, *, now_s: float
    ) -> None:
        self._stand_down(held, now_s)
        if self._watch is not None:
            self._watch.turned_away(held.turn, reason)
        retry_after_s = min(max(retry_after_s, RETRY_MIN_S), RETRY_MAX_S)
        held.entrant.turned_away(TurnedAway(reason, retry_after_s))

    def _wait_s(self, held: HeldTurn, now_s: float) -> float:
        """Estimate how long such a turn would wait if it came now: until those that go before it,
        and one more, have ended; for a seat, until those that wait for one have theirs, and one
        more. Nobody has had one lately: until time alone lets the next of them in."""
        slots = self._slots
        if held.seat is not None or slots is None:
            if self._seat_pace.is_measured:
                return self._seat_pace.turn_s * (len(self._seated) + 1)
            due_s = None if self.seats is None else self.seats.next_due_s()
            return 0.0 if due_s is None else due_s - now_s
        turn = held.turn
        places = slots.slots(turn.model)
        return self._pace.turn_s * (slots.ahead(turn) + 1) / max(places, 1)

    def _note_seats(self, now_s: float) -> None:
        self._seat_pace.note(min(len(self._seated), 1), now_s)

    def _stand_down(self, held: HeldTurn, now_s: float) -> None:
        """Give the seat back that a turn took which does not begin."""
        session = held.turn.session
        if self.seats is not None and session is not None and held.seat is None:
            self.seats.turned_away(session, now_s)

    def _take_out(self, held: HeldTurn, now_s: float) -> None:
        """Take one out of the gate where it stands, and of the queue."""
        self._forget(held)
        if held.seat is not None:
            assert self.seats is not None
            self._seated.pop(held.seat, None)
            self.seats.leave(held.seat, now_s)
        elif self._slots is not None:
            self._slots.leave(held.one)

    def _forget(self, held: HeldTurn) -> None:
        held.waits = False
        del self._waiting[held.one.ticket]
        part = self._parts[held.turn.tenant]
        part.discard(held)
        if not part.count:
            del self._parts[held.turn.tenant]
