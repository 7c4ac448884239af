"""The gateway's side of workers' admission: places are asked for before a turn is sent.

Each wait has a deadline: who hears nothing sends the turn unasked.

    turn ── ask ── Reserved ── sent with its number, Commit behind it
                |─ Reject(reason) ── the next candidate
                |─ engine_busy ── sent unasked, counted
                |─ nothing in time ── Cancel, sent unasked, counted
                `─ the client hangs up ── Cancel

A worker that does not know Cancel may answer after it: that place is given back at once.
"""

from __future__ import annotations

from ownerserve.gateway.workers.lines import Line, Lines
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Commit, Reject, Release, Reserve, Reserved, Seed

ASK_S = 0.6
"""A little over what a worker takes at most to say that it is busy."""

_NO_WORD = (
    WorkerRefusal.ENGINE_BUSY,
    WorkerRefusal.TOO_LONG,  # by an estimate: the worker counts the tokens of the turn itself
    WorkerRefusal.UNKNOWN_RESERVATION,  # it holds no places
    WorkerRefusal.MALFORMED,
)
"""Refusals that say nothing of the turn: it is sent unasked."""


class Place:
    """A place at a worker, held for one turn: until the worker begins to answer, or given back."""

    def __init__(self, line: Line, number: int) -> None:
        self.number = number
        self._line = line

    def use(self) -> None:
        """The turn is on its way."""
        self._line.tell(Commit(self.number))

    def give_back(self) -> None:
        """The turn won't come, or not to its answer. One that was used up knows no release."""
        self._line.tell(Release(self.number))


class Places:
    """All workers' admission. `counts`: what came of asking, by outcome; `late`: places that came
    when nobody waited any more; `cancelled`: workers' answers to a Cancel."""

    def __init__(self, lines: Lines, *, ask_s: float = ASK_S) -> None:
        self.counts = lines.counts
        self._ask_s = ask_s
        self._lines = lines

    def can_ask(self, worker: WorkerId) -> bool:
        """Whether the worker told where its admission answers."""
        line = self._lines.of(worker)
        return line is not None and line.holds_places

    async def reserve(self, worker: WorkerId, turn: str, seed: Seed) -> Place | Reject | None:
        """A place for the turn, or why not; None: nothing was heard in time."""
        line = self._lines.of(worker)
        answer = None
        if line is not None:
            answer = await line.ask(Reserve(TurnId(turn), seed), self._ask_s)
        match answer:
            case Reserved():
                self.counts["reserved"] += 1
                assert line is not None
                return Place(line, answer.reservation)
            case Reject(reason):
                self.counts[reason.value] += 1
                if line is not None and reason is WorkerRefusal.UNKNOWN_RESERVATION:
                    line.holds_places = False
                return None if reason in _NO_WORD else answer
            case _:
                self.counts["no_answer"] += 1
        return None
