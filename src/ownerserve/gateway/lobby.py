"""Where a new session's first turn waits for a seat (router.seats). Decides nothing.

Owns the calls that wait. Without seats every turn goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.gateway.asking import Asked
from ownerserve.kv.ids import SessionId
from ownerserve.router.messages import Arrive
from ownerserve.router.seats import Enter, Seats, Ticket
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN

Go = Callable[[], None]


class Lobby:
    """In front of one gateway's state. `now` is its clock."""

    def __init__(self, seats: Seats | None, now: Callable[[], float]) -> None:
        self.seats = seats
        self._now = now
        self._waiting: dict[Ticket, Go] = {}

    @property
    def waiting(self) -> int:
        """Sessions that wait."""
        return len(self._waiting)

    def enter(self, asked: Asked, go: Go) -> Ticket | None:
        """Call `go` now, or once there is a seat: then the ticket to `leave` with."""
        arrive = asked.arrive
        if self.seats is None or arrive.session is None:
            go()
            return None
        parent = asked.named_parent or _forked_from(arrive)
        tokens = int(arrive.prompt_bytes / DEFAULT_BYTES_PER_TOKEN)
        answer = self.seats.ask(arrive.session, tokens, parent=parent, now_s=self._now())
        if isinstance(answer, Enter):
            go()
            return None
        self._waiting[answer.ticket] = go
        return answer.ticket

    def leave(self, ticket: Ticket) -> None:
        """The client hung up."""
        if self.seats is not None and self._waiting.pop(ticket, None) is not None:
            self.seats.leave(ticket)

    def ended(self, arrive: Arrive, tokens: int) -> None:
        """A turn is over; its session's context is `tokens` (0: not told)."""
        if self.seats is not None and arrive.session is not None:
            self.seats.ended(arrive.session, tokens, self._now())
            self.look()

    def over(self, arrive: Arrive) -> None:
        """The session is over."""
        if self.seats is not None and arrive.session is not None:
            self.seats.over(arrive.session)
            self.look()

    def look(self) -> None:
        """Let in whom there is room for, and whose patience is over."""
        if self.seats is None:
            return
        for ticket in self.seats.due(self._now()):
            self._waiting.pop(ticket)()

    def let_all_in(self) -> None:
        """The gateway drains: who waits is to be refused, not to wait on."""
        waiting, self._waiting = self._waiting, {}
        for ticket, go in waiting.items():
            assert self.seats is not None
            self.seats.leave(ticket)
            go()


def _forked_from(arrive: Arrive) -> SessionId | None:
    """Whose fork it is: it shares most of its prompt. A system prompt in common is not enough."""
    shared_bytes = arrive.shared_bytes or 0
    return arrive.parent if 2 * shared_bytes >= arrive.prompt_bytes else None
