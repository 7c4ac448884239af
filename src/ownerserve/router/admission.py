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
`return_s` at most. Where the memory of one worker is not known, or
workers serve several models, there is no limit.

Who waits stands in a fair line (entry/fair.py): in the order of arrival where there is one tenant.

Owns who is inside and who waits. Pure: time comes as `now_s`, tokens are the router's estimates.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from math import inf
from typing import TypeAlias

import msgspec

from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import FairLine, InLine, Ticket
from ownerserve.router.entry.growth import SessionGrowth
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
from ownerserve.router.fleet import Fleet, room_tokens
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import Worker, WorkerRole

PROMISES_MAX = 1 << 17
"""Sessions that are remembered as let in once; of more, those unseen for longest are forgotten."""


PLACE_KEPT_S = 120.0
"""So long the place of a session is kept that left the line: clients and proxies give up on a
silent server, and try again."""
PLACES_MAX = 1 << 12
STAY_EVERY_S = 20.0
"""So often the stay, and by how much a session grows, are decided anew."""
REFILLS_PRICED = 4
"""At so many workers it is priced what a session's state would take to bring back."""
GROWTH_ASSUMED_TOKENS = 40_000
"""By so much a session is taken to grow until enough of them were over, ..."""
GROWTH_ASSUMED_SHARE = 1.0 / 16.0
"""... or by so much of a worker's memory, if that is less."""


class SeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """share            of the fleet's memory for state, in tokens, that sessions inside may fill
    growth_tokens       by how much a new session is expected to grow beyond its first prompt; None:
                        as those before it did (entry/growth.py)
    idle_s              an idle session's seat is free after this, or earlier (entry/stay.py)
    idle_least_s        but not before this; as much as `idle_s`: after that and never earlier
    return_s            a session that was inside before waits for room so long at most
    patience_s          the first in line is let in, room or not, so long after it came and the one
                        before it was let in: behind N others one waits (N + 1) times this at most
    """

    share: float = 1.0
    growth_tokens: int | None = None
    idle_s: float = 300.0
    idle_least_s: float = 0.0
    return_s: float = 300.0
    patience_s: float = 3600.0

    def __post_init__(self) -> None:
        for field in ("share", "idle_s", "return_s", "patience_s"):
            if getattr(self, field) <= 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use more than 0")


class Wait(msgspec.Struct, frozen=True):
    """The turn waits for `reason`: a later `due` names its `ticket`."""

    ticket: Ticket
    reason: WaitReason = WaitReason.SEAT


Answer: TypeAlias = Enter | Wait


class _Inside(msgspec.Struct, gc=False):
    """A session inside: it counts for `tokens` of the fleet's memory and is known to hold
    `context`."""

    tokens: int
    context: int
    seen_s: float
    live: int
    is_served: bool = False
    """Whether a turn of it has ended well."""


class _Left(msgspec.Struct, frozen=True, gc=False):
    """A left place is the ticket that one had since `came_s` who left the line at `left_s`."""

    ticket: Ticket
    came_s: float
    left_s: float


class _Back(msgspec.Struct, frozen=True, gc=False):
    """A session that was inside before is back since `came_s`, with a prompt of `tokens`."""

    session: SessionId
    tokens: int
    came_s: float


class SessionAdmission:
    """The admission decides for one router which sessions run: `ask` is called before every turn of
    a session, `ended` after it."""

    def __init__(self, fleet: Fleet, settings: SeatSettings | None = None) -> None:
        self.settings = settings or SeatSettings()
        self.impatient = 0
        """Sessions that were let in without room."""
        self._fleet = fleet
        self._inside: OrderedDict[SessionId, _Inside] = OrderedDict()  # least recently seen first
        self.stay = IdleStay(self.settings.idle_s, least_s=self.settings.idle_least_s)
        self._promised: OrderedDict[SessionId, float | None] = OrderedDict()
        """Sessions ever let in and not over, and since when no turn of each runs (s)."""
        self._held_tokens = self._context_tokens = 0
        self._waiting = FairLine()
        self._let_in_s = -inf
        """When the first in line was let in last."""
        self._back: OrderedDict[Ticket, _Back] = OrderedDict()
        """Turns of sessions that were inside, and wait for room for a state that is gone."""
        self._grown = SessionGrowth()
        self._growth_tokens: int | None = self.settings.growth_tokens
        """By how much a new session is expected to grow; None: not decided yet."""
        self._looked_s = -inf
        """When stay and growth were last decided."""
        self._came: OrderedDict[Ticket, float] = OrderedDict()
        """When those who wait came (s), the first of them first."""
        self._left: OrderedDict[SessionId, _Left] = OrderedDict()
        """Places that are kept, of those who left first before the others."""
        self._may_follow = False
        """Whether a session was let in since those who wait were asked whether they are its."""
        self._issued = 0

    @property
    def waiting(self) -> int:
        """How many turns wait for a seat."""
        return len(self._waiting) + len(self._back)

    @property
    def growth_tokens(self) -> int:
        """By how many tokens a new session is expected to grow beyond its first prompt."""
        if self._growth_tokens is not None:
            return self._growth_tokens
        capacity, workers = self._capacity_tokens(), len(self._fleet.up)
        if capacity is None or not workers:
            return GROWTH_ASSUMED_TOKENS
        return int(min(GROWTH_ASSUMED_TOKENS, max(capacity, 0.0) / workers * GROWTH_ASSUMED_SHARE))

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
        absent_tokens: int = 0,
    ) -> Answer:
        """Decide whether a turn of `tokens` prompt tokens enters or waits; `parent` is the session
        whose sub-agent or fork this one is. Those who wait are served by weight over their tenants
        and classes, and in the order of arrival within. `absent_tokens` of what the session had
        computed lie in no tier any more."""
        self._note_return(session, tokens, now_s)
        self._expire(now_s)
        if self._is_promised(session, parent):
            if self._waits_for_state(session, parent, tokens, absent_tokens=absent_tokens):
                place = self._place_of(session, now_s)
                self._back[place.ticket] = _Back(session, tokens, place.came_s)
                self._back = OrderedDict(sorted(self._back.items()))
                return Wait(place.ticket, WaitReason.STATE)
            self._enter(session, tokens, now_s=now_s, growth=0)
            return ENTER
        if not self._fleet.up:
            return ENTER
        if (not self.waiting and self._has_seat(tokens)) or self._has_idle(tokens):
            self._enter(session, tokens, now_s=now_s, growth=self.growth_tokens)
            return ENTER
        place = self._place_of(session, now_s)
        turn = EnteringTurn(
            session=session,
            prompt_tokens=tokens,
            cost_tokens=tokens + self.growth_tokens,
            parent=parent,
            tenant=tenant,
            terms=terms,
            session_class=session_class,
            came_s=now_s,
        )
        self._waiting.add(InLine(place.ticket, turn))
        self._came[place.ticket] = place.came_s
        return Wait(place.ticket)

    def ended(self, session: SessionId, tokens: int, now_s: float) -> None:
        """Note that a turn is over, well or not; the session's context is `tokens` now (0: as
        before)."""
        self._grown.ended(session, tokens, now_s)
        known = self._inside.get(session)
        if known is None:
            return
        known.live -= 1
        known.seen_s = now_s
        known.is_served = known.is_served or tokens > 0
        if not known.live and session in self._promised:
            self._promised[session] = now_s
        self._count(known, tokens, growth=0)
        self._inside.move_to_end(session)

    def turned_away(self, session: SessionId, now_s: float) -> None:
        """Note that a turn with a seat does not begin: who has it for nothing gives it back."""
        self.ended(session, 0, now_s)
        known = self._inside.get(session)
        if known is not None and not known.live and not known.is_served:
            self.over(session)

    def over(self, session: SessionId) -> None:
        """Free the seat of a session that is over, and forget what was promised to it."""
        self._grown.over(session)
        self._promised.pop(session, None)
        self._stand_up(session)

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """Take the ticket of a client that hung up out of the line, and keep its place for
        PLACE_KEPT_S; one that no longer waits is no error."""
        if (back := self._back.pop(ticket, None)) is not None:
            self._keep_place(back.session, _Left(ticket, back.came_s, now_s))
        elif (one := self._waiting.leave(ticket)) is not None:
            assert one.turn.session is not None
            self._keep_place(one.turn.session, _Left(ticket, self._came.pop(ticket), now_s))

    def place(self, ticket: Ticket) -> LinePlace:
        """Return where one stands who waits: who was inside before stands in a line of its own."""
        if ticket in self._back:
            ahead = takewhile(lambda other: other != ticket, self._back)
            return LinePlace(sum(1 for _ in ahead) + 1, len(self._back))
        return self._waiting.place(ticket)

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each stands who waits, the first of them first."""
        back = {one: LinePlace(at, len(self._back)) for at, one in enumerate(self._back, 1)}
        return back | self._waiting.places()

    def due(self, now_s: float) -> list[Ticket]:
        """Let in those whose turn it is, and return their tickets in the order of arrival; behind
        them those of their sessions' other turns, sub-agents and forks."""
        if not self.waiting:
            return []
        self._expire(now_s)
        found = self._taken_back(now_s)
        if not self._fleet.up:
            found += (one.ticket for one in self._waiting.in_order())
            for ticket in found:
                self.leave(ticket, now_s)
            return found
        idle, beside, passed = self._idle(), self._beside_tokens(), 0
        for one in self._waiting.in_order():
            if passed and not idle:
                break
            session, prompt = one.turn.session, one.turn.prompt_tokens
            has_room = not passed and not self._back and self._has_seat(prompt)
            has_room = has_room or _take(idle, prompt, beside)
            if not has_room and not self._is_impatient(now_s, one.ticket):
                passed += 1
                continue
            self.impatient += not has_room
            if not passed:
                self._let_in_s = now_s
            self._sit_down(one)
            assert session is not None
            self._enter(session, prompt, now_s=now_s, growth=self.growth_tokens)
            beside = self._beside_tokens()
            found.append(one.ticket)
        return found + self._following(now_s)

    def _place_of(self, session: SessionId, now_s: float) -> _Left:
        """Return the place that the session had a short while ago, or a new one."""
        known = self._left.pop(session, None)
        if known is not None and now_s <= known.left_s + PLACE_KEPT_S:
            return known
        self._issued += 1
        return _Left(Ticket(self._issued), now_s, now_s)

    def _keep_place(self, session: SessionId, place: _Left) -> None:
        self._left[session] = place
        self._left.move_to_end(session)
        if len(self._left) > PLACES_MAX:
            self._left.popitem(last=False)

    def _note_return(self, session: SessionId, tokens: int, now_s: float) -> None:
        """Tell the stay of a session that was away and is here again."""
        left_s = self._promised.get(session)
        if left_s is not None and (up := self._fleet.up):
            self._promised[session] = None
            some = up[:: -(-len(up) // REFILLS_PRICED)]
            refill_ms = sum(worker.speed.prefill.ms(tokens, 0) for worker in some) / len(some)
            self.stay.came_back(now_s - left_s, tokens, refill_ms / 1000.0)

    def _waits_for_state(
        self,
        session: SessionId,
        parent: SessionId | None,
        prompt: int,
        *,
        absent_tokens: int,
    ) -> bool:
        """Return whether a session that was inside before waits for room: a long part of its state
        is gone, and seats are kept for less than the longest stay."""
        if session in self._inside or parent in self._inside:
            return False
        if self.stay.seconds >= self.settings.idle_s:
            return False
        return absent_tokens >= DEFAULTS.long_tokens and not self._takes_back(prompt)

    def _takes_back(self, prompt: int) -> bool:
        """Return whether there is room for the state of a session that was inside before."""
        capacity = self._capacity_tokens()
        if not self._inside or capacity is None or self._held_tokens + prompt <= capacity:
            return True
        return _take(self._idle(), prompt, self._beside_tokens())

    def _taken_back(self, now_s: float) -> list[Ticket]:
        """Let in the first that was inside before and has room, or waits for too long, and all who
        need none any more; return their tickets."""
        found: list[Ticket] = []
        for ticket, one in list(self._back.items()):
            is_inside = one.session in self._inside or not self._fleet.up
            if not is_inside and found:
                continue
            is_late = now_s >= one.came_s + self.settings.return_s
            if is_inside or self._takes_back(one.tokens) or is_late:
                del self._back[ticket]
                self._enter(one.session, one.tokens, now_s=now_s, growth=0)
                found.append(ticket)
        return found

    def _is_impatient(self, now_s: float, ticket: Ticket) -> bool:
        """Return whether the one is first in line for longer than may be."""
        since_s = max(self._came[ticket], self._let_in_s)
        return now_s >= since_s + self.settings.patience_s

    def _sit_down(self, one: InLine) -> None:
        self._waiting.pop(one.ticket)
        del self._came[one.ticket]

    def _following(self, now_s: float) -> list[Ticket]:
        """Let in those whose session or parent was let in while they waited; return their
        tickets."""
        found: list[Ticket] = []
        while self._may_follow:
            self._may_follow = False
            for one in self._waiting.in_order():
                session, turn = one.turn.session, one.turn
                if session is not None and self._is_promised(session, turn.parent):
                    self._sit_down(one)
                    self._enter(session, turn.prompt_tokens, now_s=now_s, growth=0)
                    found.append(one.ticket)
        return found

    def _is_promised(self, session: SessionId, parent: SessionId | None) -> bool:
        return session in self._promised or parent in self._promised

    def next_due_s(self) -> float | None:
        """Return when time alone may let somebody in, as a seat goes cold or patience ends; None
        when nobody waits or no time is set."""
        if not self.waiting:
            return None
        until_s = inf
        for one in self._waiting.in_order():
            since_s = max(self._came[one.ticket], self._let_in_s)
            until_s = since_s + self.settings.patience_s
            break
        for back in self._back.values():
            until_s = min(until_s, back.came_s + self.settings.return_s)
            break
        for known in self._inside.values():
            if not known.live:
                return min(until_s, known.seen_s + self.stay.seconds)
        return until_s if until_s < inf else None

    def _enter(self, session: SessionId, prompt: int, *, now_s: float, growth: int) -> None:
        known = self._inside.get(session)
        if known is None:
            known = self._inside[session] = _Inside(0, 0, now_s, 0)
        self._may_follow = self._may_follow or session not in self._promised
        self._promised[session] = None
        self._promised.move_to_end(session)
        if len(self._promised) > PROMISES_MAX:
            self._promised.popitem(last=False)
        known.live += 1
        known.seen_s = now_s
        self._grown.began(session, prompt)
        self._count(known, prompt, growth=growth)
        self._inside.move_to_end(session)

    def _count(self, known: _Inside, context: int, *, growth: int) -> None:
        """Raise what the session is known to hold to `context` tokens, and what it counts for to
        `growth` more, where that is not less."""
        if context > known.context:
            self._context_tokens += context - known.context
            known.context = context
        if context + growth > known.tokens:
            self._held_tokens += context + growth - known.tokens
            known.tokens = context + growth

    def _has_seat(self, prompt: int) -> bool:
        """Return whether the fleet's memory takes one more session; while nobody is inside it
        always does."""
        if not self._inside:
            return True
        capacity = self._capacity_tokens()
        return capacity is None or (self._held_tokens + prompt + self.growth_tokens <= capacity)

    def _has_idle(self, prompt: int) -> bool:
        """Return whether an idle worker is left for the prompt once those who wait have taken
        theirs."""
        idle, beside = self._idle(), self._beside_tokens()
        for one in self._waiting.in_order():
            if not idle:
                return False
            _take(idle, one.turn.prompt_tokens, beside)
        return _take(idle, prompt, beside)

    def _idle(self) -> list[Worker]:
        """Return the workers that could begin a new session at once."""
        return [
            worker
            for worker in self._fleet.up
            if not worker.batch
            and not worker.pending_tokens
            and worker.profile.role is not WorkerRole.PREFILL
        ]

    def _beside_tokens(self) -> float:
        """Return how many tokens of the fleet's memory the contexts inside, as they are, leave
        free."""
        capacity = self._capacity_tokens()
        return inf if capacity is None else capacity - self._context_tokens

    def _capacity_tokens(self) -> float | None:
        """Return how many tokens the fleet holds of the sessions inside and one more, less the
        fixed bytes of each; None where a worker's memory is not known, or tokens take none of it,
        and where workers serve several models: sessions of one fill no memory of another's."""
        workers = self._fleet.up
        if len({worker.profile.model for worker in workers}) > 1:
            return None
        total = fixed = 0.0
        for worker in workers:
            profile, speed = worker.profile, worker.speed
            if not (profile.kv_bytes_total and profile.are_tokens_sized):
                return None
            if not speed.kv_bytes_per_token:
                return None
            total += profile.kv_bytes_total / speed.kv_bytes_per_token
            fixed += speed.kv_bytes_per_sequence / speed.kv_bytes_per_token
        sessions = len(self._inside) + 1
        return total * self.settings.share - fixed / max(len(workers), 1) * sessions

    def _expire(self, now_s: float) -> None:
        """Free the seats of sessions that were away for too long."""
        self._decide_stay(now_s)
        while self._inside:
            session, known = next(iter(self._inside.items()))
            if known.seen_s + self.stay.seconds > now_s:  # the same sum that `next_due_s` names
                return
            if known.live:
                known.seen_s = now_s
                self._inside.move_to_end(session)
            else:
                self._stand_up(session)

    def _decide_stay(self, now_s: float) -> None:
        """Decide anew how long an idle session keeps its seat, if that was not done lately; where a
        worker does not say how busy its engine is, it is as long as may be."""
        since_s = now_s - self._looked_s
        if since_s < STAY_EVERY_S:
            return
        self._looked_s = now_s
        self._decide_growth(now_s)
        workers, capacity = self._fleet.up, self._capacity_tokens()
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

    def _stand_up(self, session: SessionId) -> None:
        """Free the session's seat; it stays promised, so that its next turn is let in at once."""
        known = self._inside.pop(session, None)
        if known is not None:
            self._held_tokens -= known.tokens
            self._context_tokens -= known.context

    def check(self) -> None:
        """Raise InvariantViolated unless the sums of tokens are those of the sessions inside."""
        held = sum(known.tokens for known in self._inside.values())
        if held != self._held_tokens:
            raise InvariantViolated(f"3: seats hold {held} tokens, counted {self._held_tokens}")
        contexts = sum(known.context for known in self._inside.values())
        if contexts != self._context_tokens:
            raise InvariantViolated(f"3: contexts {contexts}, counted {self._context_tokens}")
        if any(known.live < 0 for known in self._inside.values()):
            raise InvariantViolated("3: a session inside ended more turns than it began")


def _take(idle: list[Worker], prompt: int, beside_tokens: float) -> bool:
    """Take a worker that has room for the prompt out of `idle`, and return whether there was one:
    where no session lives or, up to `beside_tokens`, beside the contexts inside."""
    for worker in idle:
        if room_tokens(worker) >= prompt and (not worker.bound_sessions or prompt <= beside_tokens):
            idle.remove(worker)
            return True
    return False


def forked_from(
    named: SessionId | None, like: SessionId | None, *, shared: float, prompt: float
) -> SessionId | None:
    """Return the session whose sub-agent or fork another one is: the one that its client `named`,
    else the one that it begins `like`, if they share at least half of its prompt (`shared` and
    `prompt` in one unit, bytes or tokens). A system prompt in common is not enough."""
    if named is not None:
        return named
    return like if 2 * shared >= prompt else None
