"""Requests in the air: who waits for which work, until when. Pure; the runtime does the work.

    submit    -> StartFlight for new work, nothing when the same work is already under way
    completed -> the tickets that it answers
    cancel    -> the ticket is answered at once; a flight that nobody waits for is Abandoned
    overdue   -> tickets whose deadline passed, answered; the work itself can't be stopped

A ticket is answered exactly once. A result that comes after its ticket's answer is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NewType

import msgspec

Ticket = NewType("Ticket", int)
Flight = NewType("Flight", int)


class StartFlight(msgspec.Struct, frozen=True):
    """Begin the work of a flight."""

    flight: Flight


class JoinFlight(msgspec.Struct, frozen=True):
    """The same work is under way; its result answers this ticket too."""

    flight: Flight


class Abandoned(msgspec.Struct, frozen=True):
    """Nobody waits any more: do not begin the work if it has not begun."""

    flight: Flight


class _Waiting(msgspec.Struct):
    flight: Flight
    deadline_s: float | None


class TicketFlights:
    """All tickets not yet answered. Flights with an equal `key` are one (single-flight)."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[Ticket, _Waiting] = {}
        self._tickets: dict[Flight, set[Ticket]] = {}
        self._by_key: dict[Hashable, Flight] = {}
        self._key_of: dict[Flight, Hashable] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def flying(self) -> int:
        """Work under way or queued."""
        return len(self._tickets)

    def submit(
        self, key: Hashable | None, deadline_s: float | None = None
    ) -> tuple[Ticket, StartFlight | JoinFlight]:
        """A new ticket. Work with `key` None is never shared."""
        self._next += 1
        ticket = Ticket(self._next)
        flight = None if key is None else self._by_key.get(key)
        effect: StartFlight | JoinFlight
        if flight is None:
            flight = Flight(self._next)
            self._tickets[flight] = set()
            if key is not None:
                self._by_key[key] = flight
                self._key_of[flight] = key
            effect = StartFlight(flight)
        else:
            effect = JoinFlight(flight)
        self._tickets[flight].add(ticket)
        self._waiting[ticket] = _Waiting(flight, deadline_s)
        return ticket, effect

    def completed(self, flight: Flight) -> set[Ticket]:
        """The tickets that this flight's result answers."""
        tickets = self._land(flight)
        for ticket in tickets:
            del self._waiting[ticket]
        return tickets

    def _land(self, flight: Flight) -> set[Ticket]:
        key = self._key_of.pop(flight, None)
        if key is not None and self._by_key.get(key) == flight:
            del self._by_key[key]
        return self._tickets.pop(flight, set())

    def cancel(self, ticket: Ticket) -> Abandoned | None:
        """Nobody asks for this ticket any more. Unknown or answered tickets are no error."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return None
        tickets = self._tickets[waiting.flight]
        tickets.discard(ticket)
        if tickets:
            return None
        self._land(waiting.flight)
        return Abandoned(waiting.flight)

    def overdue(self, now_s: float) -> list[tuple[Ticket, Abandoned | None]]:
        """Tickets whose deadline has passed, cancelled."""
        late = [
            ticket
            for ticket, waiting in self._waiting.items()
            if waiting.deadline_s is not None and waiting.deadline_s <= now_s
        ]
        return [(ticket, self.cancel(ticket)) for ticket in late]

    def check(self) -> None:
        """Every ticket waits for a flight that knows it, every flight has a ticket."""
        for ticket, waiting in self._waiting.items():
            assert ticket in self._tickets[waiting.flight]
        assert sum(map(len, self._tickets.values())) == len(self._waiting)
        assert all(self._tickets.values())
        assert set(self._by_key.values()) <= set(self._tickets)
