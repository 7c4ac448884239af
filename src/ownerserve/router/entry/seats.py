"""The seats in the memory of some workers: who is inside, and who is let in of those that wait.

Owns nothing of its own: who is inside is owned by `SessionsInside`, who waits by `SeatLines`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import InLine, Ticket
from ownerserve.router.entry.inside import SessionsInside
from ownerserve.router.entry.lines import SeatLines, SeatPatience
from ownerserve.router.entry.memory import capacity_tokens, idle_workers, take_idle
from ownerserve.router.worker import Worker

GROWTH_ASSUMED_TOKENS = 40_000
"""By so much a session is taken to grow until enough of them were over, ..."""
GROWTH_ASSUMED_SHARE = 1.0 / 16.0
"""... or by so much of a worker's memory, if that is less."""


class Seated(msgspec.Struct, frozen=True, gc=False):
    """One who waited is let in, with a prompt of so many tokens: as there is room, or as its
    patience is over."""

    ticket: Ticket
    session: SessionId
    tokens: int
    has_room: bool = True


class Seats:
    """The seats in the memory of `workers()`, of which sessions inside may fill a `share`."""

    def __init__(
        self, workers: Callable[[], Collection[Worker]], share: float, patience: SeatPatience
    ) -> None:
        self.inside = SessionsInside()
        self._workers = workers
        self._share = share
        self.lines = SeatLines(patience)

    def growth_tokens(self, learnt: int | None) -> int:
        """Return by how many tokens a new session is expected to grow beyond its first prompt: what
        was `learnt`, and something careful before."""
        if learnt is not None:
            return learnt
        capacity, workers = self.capacity_tokens(), len(self._workers())
        if capacity is None or not workers:
            return GROWTH_ASSUMED_TOKENS
        return int(min(GROWTH_ASSUMED_TOKENS, max(capacity, 0.0) / workers * GROWTH_ASSUMED_SHARE))

    def takes(self, prompt: int, growth: int) -> bool:
        """Return whether a new session begins at once: nobody waits and it has a seat, or an idle
        worker is left for it once those who wait have taken theirs."""
        if not self.lines and self._has_seat(prompt, growth):
            return True
        idle, beside = idle_workers(self._workers()), self._beside_tokens()
        for one in self.lines.in_order():
            if not idle:
                return False
            take_idle(idle, one.turn.prompt_tokens, beside)
        return take_idle(idle, prompt, beside)

    def takes_back(self, prompt: int) -> bool:
        """Return whether there is room for the state of a session that was inside before."""
        capacity = self.capacity_tokens()
        if not self.inside or capacity is None:
            return True
        if self.inside.held_tokens + prompt <= capacity:
            return True
        return take_idle(idle_workers(self._workers()), prompt, self._beside_tokens())

    def capacity_tokens(self) -> float | None:
        """Return how many tokens the workers hold of the sessions inside and one more; None: that
        is not known, and there is no limit."""
        workers, sessions = self._workers(), len(self.inside) + 1
        return capacity_tokens(workers, share=self._share, sessions=sessions)

    def back_in(self, now_s: float) -> list[Seated]:
        """Let in the first that was inside before and has room, or waits for too long, and all who
        need none any more, and return them."""
        found: list[Seated] = []
        for ticket, one in list(self.lines.back.items()):
            needs_none = one.session in self.inside or not self._workers()
            if not needs_none and found:
                continue
            is_late = now_s >= self.lines.patient_until_s(ticket)
            if needs_none or self.takes_back(one.tokens) or is_late:
                self.lines.pop(ticket)
                self.inside.begin(one.session, one.tokens, now_s=now_s, growth=0)
                found.append(Seated(ticket, one.session, one.tokens))
        return found

    def new_in(self, learnt: int | None, now_s: float) -> list[Seated]:
        """Let in the new sessions whose turn it is, each of which is expected to grow by
        `growth_tokens(learnt)`, and return them."""
        found: list[Seated] = []
        idle, passed = idle_workers(self._workers()), 0
        beside, growth = self._beside_tokens(), self.growth_tokens(learnt)
        for one in self.lines.in_order():
            if passed and not idle:
                break
            prompt = one.turn.prompt_tokens
            has_room = not passed and not self.lines.back and self._has_seat(prompt, growth)
            has_room = has_room or take_idle(idle, prompt, beside)
            if not has_room and now_s < self.lines.patient_until_s(one.ticket):
                passed += 1
                continue
            if not passed:
                self.lines.let_in_first(now_s)
            let_in = self.sit_down(one, now_s, growth=growth)
            found.append(msgspec.structs.replace(let_in, has_room=has_room))
            beside, growth = self._beside_tokens(), self.growth_tokens(learnt)
        return found

    def sit_down(self, one: InLine, now_s: float, *, growth: int) -> Seated:
        """Let one in who stands in line, and return it."""
        session, prompt = one.turn.session, one.turn.prompt_tokens
        assert session is not None  # a turn of none needs no seat
        self.lines.pop(one.ticket)
        self.inside.begin(session, prompt, now_s=now_s, growth=growth)
        return Seated(one.ticket, session, prompt)

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
        capacity = self.capacity_tokens()
        return capacity is None or self.inside.held_tokens + prompt + growth <= capacity

    def _beside_tokens(self) -> float:
        """Return how many tokens of the memory the contexts inside, as they are, leave free."""
        capacity = self.capacity_tokens()
        return inf if capacity is None else capacity - self.inside.context_tokens
