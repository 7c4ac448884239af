"""This module lets sessions in to the memory of one model's workers.

Owns nothing of its own: who is inside is owned by `SessionsInside`, who waits by `SeatLines`. Pure.
"""

from __future__ import annotations

from math import inf
from statistics import fmean

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.inside import SessionsInside
from ownerserve.router.entry.lines import SeatLines, SeatPatience
from ownerserve.router.entry.memory import capacity_tokens, idle_workers, take_idle
from ownerserve.router.fleet import Candidates, Fleet

GROWTH_ASSUMED_TOKENS = 40_000
"""By so much a session is taken to grow until enough of them were over, ..."""
GROWTH_ASSUMED_SHARE = 1.0 / 16.0
"""... or by so much of a worker's memory, if that is less."""
REFILL_MOST = 1.0
"""Where bringing back what a prompt displaces takes more of an engine's time, it never ends."""
BUSY_LEAST = 0.8
"""Where engines use less of their time, in the mean, refills take what is idle anyway."""


class Seated(msgspec.Struct, frozen=True, gc=False):
    """One who waited is let in, with a prompt of so many tokens: as there is room, or as its
    patience is over."""

    ticket: Ticket
    session: SessionId
    tokens: int
    has_room: bool


class SeatShare(msgspec.Struct, frozen=True, gc=False):
    """A seat share is how much of the memory contexts inside may fill; what they are expected to
    grow to may come to `overbooked` times that."""

    memory: float
    overbooked: float = 1.0


class Seats:
    """The seats in the memory of the workers that serve `model` (None: all), of which sessions
    inside may fill a `share`."""

    def __init__(
        self, fleet: Fleet, model: str | None, share: SeatShare, patience: SeatPatience
    ) -> None:
        self.inside = SessionsInside()
        self.lines = SeatLines(patience)
        self._fleet = fleet
        self._model = model
        self._share = share

    @property
    def workers(self) -> Candidates:
        """The workers that are up and in whose memory the seats are."""
        return self._fleet.candidates(self._model)

    def growth_tokens(self, learnt: int | None) -> int:
        """Return by how many tokens a new session is expected to grow beyond its first prompt: what
        was `learnt`, and something careful before."""
        if learnt is not None:
            return learnt
        capacity, workers = self.capacity_tokens(), len(self.workers)
        if capacity is None or not workers:
            return GROWTH_ASSUMED_TOKENS
        return int(min(GROWTH_ASSUMED_TOKENS, max(capacity, 0.0) / workers * GROWTH_ASSUMED_SHARE))

    def takes(self, prompt: int, growth: int, *, model: str | None) -> bool:
        """Return whether a new session that asks for `model` begins at once: nobody waits
        and it has a seat, or an idle worker is left for it once those who wait have taken
        theirs."""
        if not self.lines and self._has_seat(prompt, growth):
            return True
        idle, beside = idle_workers(self.workers), self._beside_tokens()
        for one in self.lines.in_order():
            if not idle:
                return False
            serving = self._fleet.candidates(one.turn.model)
            take_idle(idle, one.turn.prompt_tokens, beside, serving=serving)
        return take_idle(idle, prompt, beside, serving=self._fleet.candidates(model))

    def makes_room(self, session: SessionId, prompt: int) -> bool:
        """Return whether a session inside whose state is gone gives its seat up: no other turn of
        it runs, the contexts inside, as they are, are more than the memory takes, and the workers
        have no time for refills."""
        capacity = self.capacity_tokens()
        if capacity is None or self.inside.context_tokens <= capacity or self.inside.runs(session):
            return False
        return self._have_no_time(prompt)

    def _have_no_time(self, prompt: int) -> bool:
        """Return whether engines are busy, and bringing back what the prompt displaces would take
        each more time than there is; where one does not say it is taken to have some."""
        loads = [worker.load for worker in self.workers]
        busy = [load.busy_share for load in loads if load.busy_share is not None]
        if not busy or len(busy) < len(loads) or fmean(busy) < BUSY_LEAST:
            return False
        shares = [load.refill_share(prompt) for load in loads]
        return all(share is not None and share > REFILL_MOST for share in shares)

    def takes_back(self, prompt: int, *, model: str | None) -> bool:
        """Return whether there is room for the state of a session that was inside before."""
        capacity = self.capacity_tokens()
        if not self.inside or capacity is None:
            return True
        if self.inside.held_tokens + prompt <= capacity:
            return True
        idle, serving = idle_workers(self.workers), self._fleet.candidates(model)
        return take_idle(idle, prompt, self._beside_tokens(), serving=serving)

    def capacity_tokens(self) -> float | None:
        """Return how many tokens the workers hold of the sessions inside and one more; None: that
        is not known, and there is no limit."""
        sessions = len(self.inside) + 1
        return capacity_tokens(self.workers, share=self._share.memory, sessions=sessions)

    def back_in(self, now_s: float) -> list[Seated]:
        """Let in the first that was inside before and has room, or waits for too long, and all who
        need none any more, and return them."""
        found: list[Seated] = []
        for ticket, one in list(self.lines.back.items()):
            needs_none = one.session in self.inside or not self.workers
            if not needs_none and found:
                continue
            is_late = now_s >= self.lines.patient_until_s(ticket)
            if needs_none or self.takes_back(one.tokens, model=one.model) or is_late:
                self.lines.pop(ticket)
                self.inside.begin(one.session, one.tokens, now_s=now_s, growth=0)
                found.append(Seated(ticket, one.session, one.tokens, has_room=True))
        return found

    def new_in(self, learnt: int | None, now_s: float) -> list[Seated]:
        """Let in the new sessions whose turn it is, each of which is expected to grow by
        `growth_tokens(learnt)`, and return them."""
        found: list[Seated] = []
        idle, passed = idle_workers(self.workers), 0
        beside, growth = self._beside_tokens(), self.growth_tokens(learnt)
        is_late = now_s >= self.lines.due_s()
        for one in self.lines.in_order():
            if passed and not idle and not is_late:
                break
            prompt, serving = one.turn.prompt_tokens, self._fleet.candidates(one.turn.model)
            has_room = not passed and not self.lines.back and self._has_seat(prompt, growth)
            has_room = has_room or take_idle(idle, prompt, beside, serving=serving)
            if not has_room and now_s < self.lines.patient_until_s(one.ticket):
                passed += 1
                continue
            session = one.turn.session
            assert session is not None  # a turn of none needs no seat
            self.lines.let_in(one.ticket, now_s)
            self.inside.begin(session, prompt, now_s=now_s, growth=growth)
            found.append(Seated(one.ticket, session, prompt, has_room))
            beside, growth = self._beside_tokens(), self.growth_tokens(learnt)
        return found

    def due_s(self, stay_s: float) -> float | None:
        """Return when time alone may let somebody in, as a seat goes cold after `stay_s` or
        patience ends; None when nobody waits or no time is set."""
        if not self.lines:
            return None
        until_s, free_s = self.lines.due_s(), self.inside.free_s(stay_s)
        if free_s is not None:
            until_s = min(until_s, free_s)
        return until_s if until_s < inf else None

    def _has_seat(self, prompt: int, growth: int) -> bool:
        """Return whether the memory takes one more session; while nobody is inside it always
        does."""
        if not self.inside:
            return True
        booked = self._booked_tokens()
        return booked is None or self.inside.held_tokens + prompt + growth <= booked

    def _beside_tokens(self) -> float:
        """Return how many tokens of what may be booked the contexts inside, as they are, leave."""
        booked = self._booked_tokens()
        return inf if booked is None else booked - self.inside.context_tokens

    def _booked_tokens(self) -> float | None:
        """Return how many tokens sessions may be expected to grow to: they are not all at their
        longest at once, and those that displace one another can be suspended, where all workers say
        what that takes. None: there is no limit."""
        capacity, loads = self.capacity_tokens(), [worker.load for worker in self.workers]
        if capacity is None:
            return None
        can_suspend = all(load.refill_shares and load.busy_share is not None for load in loads)
        return capacity * (self._share.overbooked if can_suspend else 1.0)
