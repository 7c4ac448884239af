"""For tests of the workload: traces, and a heap that drives one with made-up service times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st

from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.workload import ReleaseKey, WorkloadDriver
from ownerserve.trace.model import Agent, Trace, TraceRequest, TraceSession
from ownerserve.trace.synth.generate import WORKLOADS, generate
from ownerserve.trace.synth.options import Options

Service = Callable[[SimTurn], float]


class Done(NamedTuple):
    turn: SimTurn
    done_s: float


def at_once(turn: SimTurn) -> float:
    """Answers cost nothing."""
    return 0.0


def uneven(turn: SimTurn) -> float:
    """Answers cost a time that differs from turn to turn and lets later ones overtake."""
    return 0.1 + (turn.session * 31 + turn.position * 17) % 23


class Walk:
    """One run. `done` is in order of finish; `busiest` is the most sessions ever under way."""

    def __init__(
        self,
        workload: WorkloadDriver,
        service: Service = at_once,
        fails: Callable[[SimTurn], bool] = lambda turn: False,
    ) -> None:
        self._queue: list[tuple[float, int, ReleaseKey | SimTurn]] = []
        self._scheduled = 0
        self.done: list[Done] = []
        self.busiest = 0
        begun: dict[int, int] = {}
        for when_s, key in workload.first():
            self._at(when_s, key)
        while self._queue:
            now, _, what = heapq.heappop(self._queue)
            if isinstance(what, SimTurn):
                self.done.append(Done(what, now))
                end = workload.failed if fails(what) else workload.finished
                for when_s, key in end(what, now):
                    assert when_s >= now
                    self._at(when_s, key)
                begun[what.session] -= 1
                if not begun[what.session]:
                    del begun[what.session]
            else:
                turn = workload.turn(what, now)
                begun.setdefault(turn.session, workload.requests_in(turn.session))
                self.busiest = max(self.busiest, len(begun))
                self._at(now + service(turn), turn)

    def _at(self, when_s: float, what: ReleaseKey | SimTurn) -> None:
        heapq.heappush(self._queue, (when_s, self._scheduled, what))
        self._scheduled += 1

    def by_place(self) -> dict[tuple[int, int], Done]:
        """By (session, position)."""
        return {(done.turn.session, done.turn.position): done for done in self.done}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small generated traces of every workload."""
    options = Options(
        sessions=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 1000)),
        reuse=draw(st.sampled_from([0.0, 0.8, 1.0])),
        arrivals_per_s=0.5,
        max_input_tokens=8_000,
    )
    return generate(draw(st.sampled_from(sorted(WORKLOADS))), options)


def of_one(*requests: TraceRequest, agents: int = 1, start_s: float = 0.0) -> Trace:
    """A trace of one session."""
    named = tuple(Agent(f"a{n}") for n in range(agents))
    session = TraceSession("only", requests, start_s=start_s, agents=named)
    return Trace("hand", "hand", 16, "trace", "recorded", "recorded", (session,))


def request(start_s: float, **fields: object) -> TraceRequest:
    return TraceRequest(start_s, 32, 8, runs=((0, 2),), **fields)  # type: ignore[arg-type]
