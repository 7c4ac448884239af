"""How many sessions may run at once: one that would not fit waits for a seat; a turn never does.

Above the memory of the fleet every policy thrashes: each turn finds its state evicted, computes it
again (seconds instead of tenths) and evicts another's (seed 003's capacity cliff). So the *first*
turn of a new session waits, in order, until the contexts of the sessions inside leave room for it.
Later turns, sub-agents and forks of sessions inside are never held; those that came while the first
turn waited enter with it.

    ask -> Enter                       its session is inside, or there is room for one more
        `> Wait(ticket) -> due         room has come, or its patience is over: `ask` is not repeated
                        `> leave       the client hung up

Nobody waits beside an idle worker but for memory that a session inside comes back to. One that runs
and awaits nothing takes the first in line whose prompt its free and evictable memory takes, if no
session lives there or the contexts inside, as they are, leave room for it; whoever stands before
that one keeps place and patience. A worker takes one at a time. (To displace the contexts of idle
sessions too, in agents' tool gaps, is no seats at all: it was tried, see docs/routing.md.)
While no worker is up nobody waits either, to be refused at once; nothing is promised then.

A session is inside while a turn of it runs and for a stay after, `idle_s` at most, which follows
from what the fleet does (entry/stay.py). One that comes back later and finds its state where it was
goes on; if some long part of it is gone from every tier, and seats are kept for less than the
longest stay just then, it takes memory like a new one: it waits for room, before all new ones,
`return_s` at most. So does one inside whose state is gone, once the contexts inside have outgrown
the memory and engines have no time for refills: what is known as load control of a machine that
thrashes (Denning, Working Sets Past and Present, 1980).

Each model has seats and a line of its own (entry/by_model.py), in the memory of the workers that
serve it; stay and growth are the fleet's. Where the memory of one of those is not known, there is
no limit for that model. Who waits stands in a fair line (entry/fair.py): in the order of arrival
where there is one tenant.

Owns what stay and growth are taken to be just now; who is inside (entry/inside.py), who
was (entry/promised.py), who waits (entry/lines.py) and whose place is kept (entry/kept.py) is owned
by others. Pure: time comes as `now_s`, tokens are the router's estimates.
"""

from __future__ import annotations

from math import inf
from typing import TypeAlias

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.by_model import SeatsByModel
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.growth import SessionGrowth
from ownerserve.router.entry.inside import Seat
from ownerserve.router.entry.kept import KeptPlaces
from ownerserve.router.entry.lines import Back, SeatPatience
from ownerserve.router.entry.promised import PromisedSessions
from ownerserve.router.entry.seats import Seated, Seats, SeatShare
from ownerserve.router.entry.stay import IdleStay
from ownerserve.router.entry.terms import (
    ENTER,
    NO_TERMS,
    Enter,
    EnteringTurn,
    LinePlace,
    SessionClass,
    TenantTerms,
    WaitReason,
)
from ownerserve.router.fleet import Fleet
from ownerserve.router.settings import DEFAULTS

STAY_EVERY_S = 20.0
"""So often the stay, and by how much a session grows, are decided anew."""
REFILLS_PRICED = 4
"""At so many workers it is priced what a session's state would take to bring back."""


class SeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """share            of the fleet's memory for state, in tokens, that sessions inside may fill;
                        host memory counts where it brings state back quickly (entry/memory.py)
    overbooked          what they are expected to grow to may come to so many times that
    growth_tokens       by how much a new session is expected to grow beyond its first prompt; None:
                        as those before it did (entry/growth.py)
    idle_s              an idle session's seat is free after this, or earlier (entry/stay.py)
    idle_least_s        but not before this; as much as `idle_s`: after that and never earlier
    return_s            a session that was inside before waits for room so long at most
    patience_s          who came first of those in line is let in, room or not, so long after it
                        came and the one before it was let in: behind N who came earlier one waits
                        (N + 1) times this at most, whatever the fair line lets in meanwhile
    """

    share: float = 1.0
    overbooked: float = 1.1
    growth_tokens: int | None = None
    idle_s: float = 300.0
    idle_least_s: float = 0.0
    return_s: float = 300.0
    patience_s: float = 3600.0

    def __post_init__(self) -> None:
        for field in ("share", "overbooked", "idle_s", "return_s", "patience_s"):
            if getattr(self, field) <= 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use more than 0")


class Wait(msgspec.Struct, frozen=True):
    """The turn waits for `reason`: a later `due` names its `ticket`."""

    ticket: Ticket
    reason: WaitReason = WaitReason.SEAT


Answer: TypeAlias = Enter | Wait


class SessionAdmission:
    """The admission decides for one router which sessions run: `ask` is called before every turn of
    a session, `ended` after it."""

    def __init__(self, fleet: Fleet, settings: SeatSettings | None = None) -> None:
        self.settings = settings or SeatSettings()
        self.impatient = 0
        """Sessions that were let in without room."""
        self._fleet = fleet
        self.stay = IdleStay(self.settings.idle_s, least_s=self.settings.idle_least_s)
        patience = SeatPatience(self.settings.patience_s, self.settings.return_s)
        share = SeatShare(self.settings.share, self.settings.overbooked)
        self._seats = SeatsByModel(fleet, share, patience)
        self._promised = PromisedSessions()
        self._kept = KeptPlaces()
        self._grown = SessionGrowth()
        self._growth_tokens: int | None = self.settings.growth_tokens
        """By how much a new session is expected to grow; None: not decided yet."""
        self._looked_s = -inf
        """When stay and growth were last decided."""
        self._may_follow = False
        """Whether a session was let in since those who wait were asked whether they are its."""

    @property
    def waiting(self) -> int:
        """How many turns wait for a seat."""
        return sum([len(seats.lines) for seats in self._seats])

    @property
    def growth_tokens(self) -> int:
        """By how many tokens a new session that names no model is expected to grow beyond its first
        prompt."""
        return self._seats.of_model(None).growth_tokens(self._growth_tokens)

    def ask(
        self,
        session: SessionId,
        tokens: int,
        *,
        parent: SessionId | None,
        now_s: float,
        tenant: str = "",
        terms: TenantTerms = NO_TERMS,
        session_class: SessionClass = SessionClass.NEW,
        model: str | None = None,
        absent_tokens: int = 0,
    ) -> Answer:
        """Decide whether a turn of `tokens` prompt tokens enters or waits; `parent` is the session
        whose sub-agent or fork this one is. Those who wait are served by weight over their tenants
        and classes, and in the order of arrival within, each `model` for itself. `absent_tokens` of
        what the session had computed lie in no tier any more."""
        self._note_return(session, tokens, model, now_s=now_s)
        self._expire(now_s)
        if self._is_promised(session, parent):
            if absent_tokens >= DEFAULTS.long_tokens and self._waits_for_state(
                session, parent, tokens, model=model
            ):
                place = self._kept.take(session, now_s)
                back = Back(session, tokens, model, place.came_s)
                self._seats.of_model(model).lines.add_back(place.ticket, back)
                return Wait(place.ticket, WaitReason.STATE)
            self._enter(self._seats.of(session, model), session, tokens, now_s=now_s)
            return ENTER
        if not self._fleet.candidates(model):
            return ENTER
        seats = self._seats.of(session, model)
        growth = seats.growth_tokens(self._growth_tokens)
        if seats.takes(tokens, growth, model=model):
            self._enter(seats, session, tokens, now_s=now_s, growth=growth)
            return ENTER
        place = self._kept.take(session, now_s)
        turn = EnteringTurn(
            session=session,
            prompt_tokens=tokens,
            cost_tokens=tokens + growth,
            parent=parent,
            tenant=tenant,
            terms=terms,
            session_class=session_class,
            model=model,
            came_s=now_s,
        )
        seats.lines.add(place, turn)
        return Wait(place.ticket)

    def ended(self, session: SessionId, tokens: int, now_s: float) -> None:
        """Note that a turn is over, well or not; the session's context is `tokens` now (0: as
        before)."""
        self._ended(session, tokens, now_s)

    def turned_away(self, session: SessionId, now_s: float) -> None:
        """Note that a turn with a seat does not begin: who has it for nothing gives it back."""
        seat = self._ended(session, 0, now_s)
        if seat is not None and not seat.live and not seat.is_served:
            self.over(session)

    def over(self, session: SessionId) -> None:
        """Free the seat of a session that is over, and forget what was promised to it."""
        self._grown.over(session)
        self._promised.over(session)
        for seats in self._seats:
            seats.inside.stand_up(session)

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """Take the ticket of a client that hung up out of the line, and keep its place for
        PLACE_KEPT_S; one that no longer waits is no error."""
        seats = self._seats.before(ticket)
        if seats is not None and (left := seats.lines.leave(ticket, now_s)) is not None:
            self._kept.keep(*left)

    def place(self, ticket: Ticket) -> LinePlace:
        """Return where one stands who waits, in the line of its model: who was inside before stands
        in another. Raises KeyError for one who does not wait."""
        seats = self._seats.before(ticket)
        if seats is None:
            raise KeyError(ticket)
        return seats.lines.place(ticket)

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each stands who waits, the first of each line first."""
        return {at: place for one in self._seats for at, place in one.lines.places().items()}

    def due(self, now_s: float) -> list[Ticket]:
        """Let in those whose turn it is, and return their tickets, each model's in their order;
        behind them those of their sessions' other turns, sub-agents and forks."""
        if not self.waiting:
            return []
        self._expire(now_s)
        found: list[Ticket] = []
        for seats in self._seats:
            found += self._noted(seats.back_in(now_s))
            if seats.workers:
                found += self._noted(seats.new_in(self._growth_tokens, now_s))
            else:
                found += self._let_go(seats, now_s)
        return found + self._following(now_s)

    def next_due_s(self) -> float | None:
        """Return when time alone may let somebody in, as a seat goes cold or patience ends; None
        when nobody waits or no time is set."""
        dues = [seats.due_s(self.stay.seconds) for seats in self._seats]
        return min([due_s for due_s in dues if due_s is not None], default=None)

    def check(self) -> None:
        """Raise InvariantViolated unless the sums of tokens are those of the sessions inside."""
        for seats in self._seats:
            seats.inside.check()

    def _enter(
        self, seats: Seats, session: SessionId, prompt: int, *, now_s: float, growth: int = 0
    ) -> None:
        seats.inside.begin(session, prompt, now_s=now_s, growth=growth)
        self._note_begun(session, prompt)

    def _let_go(self, seats: Seats, now_s: float) -> list[Ticket]:
        """Let all who wait go on without a seat, to be refused at once, and return their tickets:
        no worker serves their model. Their places are kept."""
        found = [one.ticket for one in seats.lines.in_order()]
        for ticket in found:
            self.leave(ticket, now_s)
        return found

    def _noted(self, let_in: list[Seated]) -> list[Ticket]:
        """Note who was let in, and return their tickets."""
        for one in let_in:
            self.impatient += not one.has_room
            self._note_begun(one.session, one.tokens)
        return [one.ticket for one in let_in]

    def _note_begun(self, session: SessionId, prompt: int) -> None:
        self._may_follow = self._may_follow or session not in self._promised
        self._promised.begin(session)
        self._grown.began(session, prompt)

    def _ended(self, session: SessionId, tokens: int, now_s: float) -> Seat | None:
        self._grown.ended(session, tokens, now_s)
        for seats in self._seats:
            if (seat := seats.inside.end(session, tokens, now_s)) is not None:
                if not seat.live:
                    self._promised.leave(session, now_s)
                return seat
        return None

    def _note_return(
        self, session: SessionId, tokens: int, model: str | None, *, now_s: float
    ) -> None:
        """Tell the stay of a session that was away and is here again."""
        left_s = self._promised.come_back(session)
        if left_s is not None and (up := tuple(self._fleet.candidates(model))):
            some = up[:: -(-len(up) // REFILLS_PRICED)]
            refill_ms = sum(worker.speed.prefill.ms(tokens, 0) for worker in some) / len(some)
            self.stay.came_back(now_s - left_s, tokens, refill_ms / 1000.0)

    def _waits_for_state(
        self,
        session: SessionId,
        parent: SessionId | None,
        prompt: int,
        *,
        model: str | None,
    ) -> bool:
        """Return whether a session of whose state a long part is gone waits for room: one that was
        inside before while seats are kept for less than the longest stay; one inside, which gives
        its seat up, while sessions displace one another."""
        if self._seats.where(parent) is not None:
            return False
        if (seats := self._seats.where(session)) is not None:
            if not seats.makes_room(session, prompt):
                return False
            seats.inside.stand_up(session)
            return True
        if self.stay.seconds >= self.settings.idle_s:
            return False
        return not self._seats.of_model(model).takes_back(prompt, model=model)

    def _following(self, now_s: float) -> list[Ticket]:
        """Let in those whose session or parent was let in while they waited; return their
        tickets."""
        found: list[Ticket] = []
        while self._may_follow:
            self._may_follow = False
            for seats in self._seats:
                for one in seats.lines.in_order():
                    session, turn = one.turn.session, one.turn
                    if session is not None and self._is_promised(session, turn.parent):
                        seats.lines.pop(one.ticket)
                        own = self._seats.of(session, turn.model)
                        self._enter(own, session, turn.prompt_tokens, now_s=now_s)
                        found.append(one.ticket)
        return found

    def _is_promised(self, session: SessionId, parent: SessionId | None) -> bool:
        return session in self._promised or parent in self._promised

    def _expire(self, now_s: float) -> None:
        """Free the seats of sessions that were away for too long."""
        self._decide_stay(now_s)
        for seats in self._seats:
            seats.inside.expire(self.stay.seconds, now_s)

    def _decide_stay(self, now_s: float) -> None:
        """Decide anew how long an idle session keeps its seat, if that was not done lately; where a
        worker does not say how busy its engine is, or workers serve several models, it is as long
        as may be."""
        since_s = now_s - self._looked_s
        if since_s < STAY_EVERY_S:
            return
        self._looked_s = now_s
        self._decide_growth(now_s)
        workers, capacity = self._fleet.up, self._seats.of_model(None).capacity_tokens()
        shares = [worker.load.busy_share for worker in workers]
        busy = [share for share in shares if share is not None]
        if capacity is None or not workers or len(busy) < len(workers):
            self.stay.decide(0.0, 0)
        elif since_s < inf:
            self.stay.ran(sum(busy) * since_s)
            self.stay.decide(capacity, len(workers))

    def _decide_growth(self, now_s: float) -> None:
        """Decide anew by how much a new session is expected to grow, where sessions have told."""
        if self.settings.growth_tokens is None and (grown := self._grown.tokens(now_s)) is not None:
            self._growth_tokens = int(grown)


def forked_from(
    named: SessionId | None, like: SessionId | None, *, shared: float, prompt: float
) -> SessionId | None:
    """Return the session whose sub-agent or fork another one is: the one that its client `named`,
    else the one that it begins `like`, if they share at least half of its prompt (`shared` and
    `prompt` in one unit, bytes or tokens). A system prompt in common is not enough."""
    if named is not None:
        return named
    return like if 2 * shared >= prompt else None
