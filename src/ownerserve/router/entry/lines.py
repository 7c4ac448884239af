"""The two lines before seats: who was inside before and waits for a state that is gone, by ticket;
and behind them new sessions, in a fair line (entry/fair.py).

Owns who waits, since when, and when the one that came first of the new ones was let in. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from math import inf

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import FairLine, InLine, Ticket
from ownerserve.router.entry.kept import KeptPlace
from ownerserve.router.entry.terms import EnteringTurn, LinePlace


class SeatPatience(msgspec.Struct, frozen=True, gc=False):
    """Patience is how long one waits at most without room who came before all others in line: a new
    session, and one that was inside before."""

    new_s: float
    return_s: float


class Back(msgspec.Struct, frozen=True, gc=False):
    """A session that was inside before is back since `came_s`, with a prompt of `tokens` for
    `model`."""

    session: SessionId
    tokens: int
    model: str | None
    came_s: float


class SeatLines:
    """The lines hold turns until somebody takes them out who has a seat for them."""

    def __init__(self, patience: SeatPatience) -> None:
        self._patience = patience
        self.back: OrderedDict[Ticket, Back] = OrderedDict()
        """The turns of sessions that were inside before, in order. Read it only."""
        self._line = FairLine()
        self._came: OrderedDict[Ticket, float] = OrderedDict()
        """When those in line came (s), who came first before the others."""
        self._let_in_s = -inf

    def __len__(self) -> int:
        """Return how many turns wait."""
        return len(self._line) + len(self.back)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._came or ticket in self.back

    def add(self, place: KeptPlace, turn: EnteringTurn) -> None:
        """Put a new session's turn in line."""
        self._line.add(InLine(place.ticket, turn))
        is_back = bool(self._came) and next(reversed(self._came)) > place.ticket
        self._came[place.ticket] = place.came_s
        if is_back:
            self._came = OrderedDict(sorted(self._came.items()))

    def add_back(self, ticket: Ticket, back: Back) -> None:
        """Let a session wait that was inside before, before all new ones."""
        self.back[ticket] = back
        self.back = OrderedDict(sorted(self.back.items()))

    def in_order(self) -> Iterator[InLine]:
        """Yield the new sessions' turns in the order in which they would be let in."""
        return self._line.in_order()

    def pop(self, ticket: Ticket) -> None:
        """Take one out who has a seat now."""
        if self.back.pop(ticket, None) is None:
            self._line.pop(ticket)
            del self._came[ticket]

    def let_in(self, ticket: Ticket, now_s: float) -> None:
        """Take a new one out who has a seat now. If it came before all others, the patience of the
        next of those begins."""
        if ticket == next(iter(self._came)):
            self._let_in_s = now_s
        self.pop(ticket)

    def leave(self, ticket: Ticket, now_s: float) -> tuple[SessionId, KeptPlace] | None:
        """Take one out who is not let in, and return whose place it was; None: nobody has that
        ticket."""
        if (back := self.back.pop(ticket, None)) is not None:
            return back.session, KeptPlace(ticket, back.came_s, now_s)
        if (one := self._line.leave(ticket)) is not None:
            assert one.turn.session is not None
            return one.turn.session, KeptPlace(ticket, self._came.pop(ticket), now_s)
        return None

    def place(self, ticket: Ticket) -> LinePlace:
        """Return where one stands who waits: who was inside before stands in a line of its own."""
        if ticket in self.back:
            ahead = takewhile(lambda other: other != ticket, self.back)
            return LinePlace(sum(1 for _ in ahead) + 1, len(self.back))
        return self._line.place(ticket)

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each stands who waits, the first of them first."""
        back = {one: LinePlace(at, len(self.back)) for at, one in enumerate(self.back, 1)}
        return back | self._line.places()

    def patient_until_s(self, ticket: Ticket) -> float:
        """Return until when one waits without room; infinite: a new one that came behind another.
        Wherever the fair line puts it: by weight alone one would wait for ever behind those of
        tenants that were never seen before."""
        if (back := self.back.get(ticket)) is not None:
            return back.came_s + self._patience.return_s
        if ticket != next(iter(self._came)):
            return inf
        return max(self._came[ticket], self._let_in_s) + self._patience.new_s

    def due_s(self) -> float:
        """Return when the first patience ends; infinite: nobody waits."""
        first = [next(iter(line)) for line in (self._came, self.back) if line]
        return min(map(self.patient_until_s, first), default=inf)
