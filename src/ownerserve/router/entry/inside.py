"""This module counts who is inside, and how many tokens of memory their contexts fill.

A session counts for what its context is known to hold and for what it is expected to grow by, until
its context is that long. Idle ones stand up when they were away for longer than the stay.

Owns the seats and the sums over them. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId


class Seat(msgspec.Struct, gc=False):
    """A seat is a session inside: it counts for `tokens` of the fleet's memory and is known to hold
    `context`; `live` turns of it run, and it was seen at `seen_s` last."""

    tokens: int
    context: int
    seen_s: float
    live: int
    is_served: bool = False
    """Whether a turn of it has ended well."""


class SessionsInside:
    """The sessions inside, the least recently seen first. `held_tokens` is what they count for,
    `context_tokens` what they are known to hold; read them only."""

    def __init__(self) -> None:
        self.held_tokens = self.context_tokens = 0
        self._seats: OrderedDict[SessionId, Seat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, session: object) -> bool:
        return session in self._seats

    def begin(self, session: SessionId, prompt: int, *, now_s: float, growth: int) -> None:
        """Note that a turn of the session begins, with a prompt of so many tokens, and that it is
        expected to grow by `growth` more."""
        seat = self._seats.get(session)
        if seat is None:
            seat = self._seats[session] = Seat(0, 0, now_s, 0)
        seat.live += 1
        seat.seen_s = now_s
        self._count(seat, prompt, growth=growth)
        self._seats.move_to_end(session)

    def end(self, session: SessionId, tokens: int, now_s: float) -> Seat | None:
        """Note that a turn of the session is over, well or not, and return its seat; its context is
        `tokens` now (0: as before). None: it has no seat."""
        seat = self._seats.get(session)
        if seat is None:
            return None
        seat.live -= 1
        seat.seen_s = now_s
        seat.is_served = seat.is_served or tokens > 0
        self._count(seat, tokens, growth=0)
        self._seats.move_to_end(session)
        return seat

    def runs(self, session: SessionId) -> bool:
        """Return whether a turn of the session runs."""
        seat = self._seats.get(session)
        return seat is not None and seat.live > 0

    def stand_up(self, session: SessionId) -> None:
        """Free the session's seat, if it has one."""
        seat = self._seats.pop(session, None)
        if seat is not None:
            self.held_tokens -= seat.tokens
            self.context_tokens -= seat.context

    def expire(self, stay_s: float, now_s: float) -> None:
        """Free the seats of sessions that were away for longer than the stay."""
        while self._seats:
            session, seat = next(iter(self._seats.items()))
            if seat.seen_s + stay_s > now_s:  # the same sum that `free_s` names
                return
            if seat.live:
                seat.seen_s = now_s
                self._seats.move_to_end(session)
            else:
                self.stand_up(session)

    def free_s(self, stay_s: float) -> float | None:
        """Return when the first seat is free by time alone; None: every session inside runs."""
        for seat in self._seats.values():
            if not seat.live:
                return seat.seen_s + stay_s
        return None

    def check(self) -> None:
        """Raise InvariantViolated unless the sums of tokens are those of the sessions inside."""
        held = sum(seat.tokens for seat in self._seats.values())
        if held != self.held_tokens:
            raise InvariantViolated(f"3: seats hold {held} tokens, counted {self.held_tokens}")
        contexts = sum(seat.context for seat in self._seats.values())
        if contexts != self.context_tokens:
            raise InvariantViolated(f"3: contexts {contexts}, counted {self.context_tokens}")
        if any(seat.live < 0 for seat in self._seats.values()):
            raise InvariantViolated("3: a session inside ended more turns than it began")

    def _count(self, seat: Seat, context: int, *, growth: int) -> None:
        """Raise what the session is known to hold to `context` tokens, and what it counts for to
        `growth` more, where that is not less."""
        if context > seat.context:
            self.context_tokens += context - seat.context
            seat.context = context
        if context + growth > seat.tokens:
            self.held_tokens += context + growth - seat.tokens
            seat.tokens = context + growth
