"""Workers' admission as the gateway uses it: which turns ask for a place first, and the asking.

A direct append goes where its state is, at once: the worker judges it as it arrives, before any
work. Every other turn asks for its place first. One that all refused for want of room is sent
without a promise and waits in the best worker's queue. Each wait has a deadline: who hears nothing
sends the turn unasked.

    turn ── ask ── Reserved ── sent with its number, Commit behind it
                |─ Reject(reason) ── the next candidate
                |─ engine_busy ── sent unasked, counted
                |─ nothing in time ── Cancel, sent unasked, counted
                `─ the client hangs up ── Cancel

A worker that does not know Cancel may answer after it: that place is given back at once.
"""

from __future__ import annotations

from enum import StrEnum

from ownerserve.gateway.http.heads import RequestHead
from ownerserve.gateway.workers.rpc import WorkerLine, WorkerLines
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Commit, Reject, Release, Reserve, Reserved, Seed
from ownerserve.router.decision import TurnClass
from ownerserve.router.messages import Dispatch
from ownerserve.router.sessions import SessionTable

TURNS = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages")
MARGIN = 1.25
"""A prompt's tokens are estimated from its bytes; one that is longer than its place is judged anew
as it arrives."""
OUTPUT_TOKENS = 1024
"""Asked for the answer of a session that has not answered yet."""

_APPENDS = (TurnClass.DECODE_CONTINUATION, TurnClass.SMALL_INCREMENT, TurnClass.LONG_TOOL_OUTPUT)
_ON_THE_SPOT = (PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION)


class Manner(StrEnum):
    """How a request deals with workers' admission."""

    ASKING = "asking"
    """The request asks first; a direct append is judged on its arrival."""
    UNASKED = "unasked"
    """The request takes its chance in a queue."""


def is_turn(head: RequestHead) -> bool:
    """Whether a request is a session's turn: a listing needs no place."""
    return head.method == b"POST" and head.target.startswith(TURNS)


def is_direct_append(dispatch: Dispatch) -> bool:
    """Whether the worker should have the session's state on its device."""
    decision = dispatch.decision
    return (
        decision.cached_tokens > 0
        and dispatch.turn in _APPENDS
        and decision.action in _ON_THE_SPOT
        and not decision.moved_tokens
    )


def seed_of(dispatch: Dispatch, sessions: SessionTable) -> Seed:
    """The place that a turn needs."""
    known = None if dispatch.session is None else sessions.get(dispatch.session)
    output = known.output_tokens if known is not None else 0.0
    return Seed(
        int(dispatch.prompt_tokens * MARGIN) + 1,
        output_tokens=int(output * MARGIN) + 1 if output else OUTPUT_TOKENS,
    )


ASK_S = 0.6
"""A little over what a worker takes at most to say that it is busy."""

_NO_WORD = (
    WorkerRefusal.ENGINE_BUSY,
    WorkerRefusal.TOO_LONG,  # by an estimate: the worker counts the tokens of the turn itself
    WorkerRefusal.UNKNOWN_RESERVATION,  # it holds no places
    WorkerRefusal.MALFORMED,
)
"""Refusals that say nothing of the turn: it is sent unasked."""


class HeldPlace:
    """A place at a worker, held for one turn: until the worker begins to answer, or given back."""

    def __init__(self, line: WorkerLine, number: int) -> None:
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

    def __init__(self, lines: WorkerLines, *, ask_s: float = ASK_S) -> None:
        self.counts = lines.counts
        self._ask_s = ask_s
        self._lines = lines

    def can_ask(self, worker: WorkerId) -> bool:
        """Whether the worker told where its admission answers."""
        line = self._lines.of(worker)
        return line is not None and line.holds_places

    async def reserve(self, worker: WorkerId, turn: str, seed: Seed) -> HeldPlace | Reject | None:
        """A place for the turn, or why not; None: nothing was heard in time."""
        line = self._lines.of(worker)
        answer = None
        if line is not None:
            answer = await line.ask(Reserve(TurnId(turn), seed), self._ask_s)
        match answer:
            case Reserved():
                self.counts["reserved"] += 1
                assert line is not None
                return HeldPlace(line, answer.reservation)
            case Reject(reason):
                self.counts[reason.value] += 1
                if line is not None and reason is WorkerRefusal.UNKNOWN_RESERVATION:
                    line.holds_places = False
                return None if reason in _NO_WORD else answer
            case _:
                self.counts["no_answer"] += 1
        return None
