"""This module has the seats of each model, since a session fills memory only of the workers that
serve its model.

Adapters share the seats of the model that they adapt. A session counts where it began. Nobody is
held for a model that no worker is known to serve, or one that workers of several models serve (some
name none): which memory it fills is not known. Such sessions count for no model.

Owns which seats there are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.lines import SeatPatience
from ownerserve.router.entry.seats import Seats, SeatShare
from ownerserve.router.fleet import Fleet


class SeatsByModel:
    """The seats of all models, each with lines of its own; iteration goes over them."""

    def __init__(self, fleet: Fleet, share: SeatShare, patience: SeatPatience) -> None:
        self._fleet = fleet
        self._share = share
        self._patience = patience
        self._seats: dict[str | None, Seats] = {}
        """By what workers state as their model; None: of no one model."""

    def __iter__(self) -> Iterator[Seats]:
        return iter(self._seats.values())

    def of(self, session: SessionId, model: str | None) -> Seats:
        """Return the seats among which the session is, or where a turn of it that names `model`
        would take one."""
        return self.where(session) or self.of_model(model)

    def of_model(self, model: str | None) -> Seats:
        """Return the seats of a session that asks for `model`; None: it names none."""
        served = {worker.profile.model for worker in self._fleet.candidates(model)}
        base = served.pop() if len(served) == 1 else None
        seats = self._seats.get(base)
        if seats is None:
            seats = self._seats[base] = Seats(self._fleet, base, self._share, self._patience)
        return seats

    def where(self, session: SessionId | None) -> Seats | None:
        """Return the seats among which the session is; None: it is not inside."""
        for seats in self._seats.values():
            if session in seats.inside:
                return seats
        return None

    def before(self, ticket: Ticket) -> Seats | None:
        """Return the seats before which the ticket's turn waits; None: it does not."""
        for seats in self._seats.values():
            if ticket in seats.lines:
                return seats
        return None
