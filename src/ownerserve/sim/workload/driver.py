"""The workload driver says which turn is released when, and what it asks for.

Owns the progress of the trace. Pure: time comes in as `now`, releases go out as data; a caller's
clock performs them. Never knows where a turn runs.

    first(now) -> releases          (when_s, key), ...
    turn(key, now) -> Turn          at when_s: built only now
    finished(turn, now) -> releases what this one's end sets free
"""

from __future__ import annotations

from typing import NewType
from weakref import WeakValueDictionary

from ownerserve.kv.ids import SessionId
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.workload.cast import PlayedSession, cast
from ownerserve.sim.workload.course import Course, roots
from ownerserve.sim.workload.live import LiveSession
from ownerserve.sim.workload.shape import Capped, Open, WorkloadShape
from ownerserve.sim.workload.unit_ids import UnitIds
from ownerserve.trace.model import Trace, TraceSession

ReleaseKey = NewType("ReleaseKey", int)
"""A turn that has not been built: its session's number and its position in it."""

_POSITION_BITS = 32
_POSITION = (1 << _POSITION_BITS) - 1


class WorkloadDriver:
    """A driver plays a trace: turns are released once each; a session's state lives while it
    runs."""

    def __init__(self, trace: Trace, shape: WorkloadShape, parts: list[PlayedSession]) -> None:
        self._trace = trace
        self._shape = shape
        self._parts = parts
        self._ids = UnitIds(trace, parts, shape)
        self._live: dict[int, LiveSession] = {}
        self._has_copies = any(part.copy for part in parts)
        self._courses: WeakValueDictionary[tuple[int, int], Course] = WeakValueDictionary()
        self._origin_s = 0.0
        self._released = 0
        self._started = 0
        self.block_tokens = self._ids.unit_tokens
        """Tokens of a unit."""
        self.sessions = len(parts)
        self.requests = sum(part.turns for part in parts)
        self.ended = 0
        """Sessions whose turns are all done."""
        self.failed_sessions: set[int] = set()
        """Sessions with at least one failed turn."""

    @classmethod
    def of(cls, trace: Trace, shape: WorkloadShape) -> WorkloadDriver:
        """Make the workload of a trace in a shape. Raises InvalidInput for a shape that can't
        be."""
        shape.check()
        return cls(trace, shape, cast(trace, shape))

    def requests_in(self, session: int) -> int:
        """Return how many turns session `session` has."""
        return self._parts[session].turns

    def input_tokens_in(self, session: int) -> int:
        """Return the prompt tokens of all turns of a session."""
        part = self._parts[session]
        requests = self._trace.sessions[part.source].requests[: part.turns]
        return sum(request.input_tokens for request in requests)

    def first(self, now: float = 0.0) -> list[tuple[float, ReleaseKey]]:
        """Return the releases known at the start, for a run that begins at `now`."""
        self._origin_s = now
        if isinstance(self._shape.mode, Open):
            return self._all_recorded()
        if isinstance(self._shape.mode, Capped):
            releases: list[tuple[float, ReleaseKey]] = []
            for _ in range(min(self._shape.mode.lanes, self.sessions)):
                releases += self._next_session(now)
            return releases
        return [
            release
            for number, part in enumerate(self._parts)
            for release in self._begin(number, now + part.start_s)
        ]

    def turn(self, key: ReleaseKey, now: float) -> SimTurn:
        """Build the turn of a release, at its time."""
        number, position = key >> _POSITION_BITS, key & _POSITION
        live = self._live.get(number) or self._open(number)
        request = live.course.requests[position]
        prompt, output = live.content(position, self._shape.output_reuse)
        turn = SimTurn(
            self._released, number, live.name(position), position, now, prompt,
            request.input_tokens or 1, request.output_tokens or 1, output,
            is_last=not live.course.following[position],
        )  # fmt: skip
        if position in live.course.openings:
            fork = live.fork(position, self.block_tokens)
            if fork is not None:
                turn.parent, turn.shared_tokens = fork
        self._released += 1
        return turn

    def finished(self, turn: SimTurn, now: float) -> list[tuple[float, ReleaseKey]]:
        """End a turn, and return what that releases, and when.

        Released are the turns that waited for it last, after their think time; in capped mode also
        the session that takes an ended one's lane.
        """
        number = turn.session
        live = self._live[number]
        freed = live.finish(turn.position)
        releases: list[tuple[float, ReleaseKey]] = []
        if not isinstance(self._shape.mode, Open):
            scale = self._shape.tool_scale
            releases = [(now + scale * live.course.delay_s(p), _key(number, p)) for p in freed]
        if not live.undone:
            del self._live[number]
            self.ended += 1
            if isinstance(self._shape.mode, Capped):
                releases += self._next_session(now)
        return releases

    def failed(self, turn: SimTurn, now: float) -> list[tuple[float, ReleaseKey]]:
        """End a turn as `finished` does and mark its session as failed; successors still run."""
        self.failed_sessions.add(turn.session)
        return self.finished(turn, now)

    def next_release_s(self, turn: SimTurn, now: float) -> float | None:
        """Return when its conversation's next turn is released if this one ends at `now`: for
        oracles.

        What else the next turn waits for is taken to last as long as it was recorded. None after a
        conversation's last turn.
        """
        live = self._live.get(turn.session)
        if turn.is_last or live is None:
            return None
        following = live.course.following[turn.position]
        if isinstance(self._shape.mode, Open):
            return self._recorded_s(turn.session, live.course.requests[following].start_s)
        return now + self._shape.tool_scale * live.course.away_s(turn.position)

    def conversation(self, key: ReleaseKey) -> SessionId | None:
        """Return the conversation whose turn a release is; None for a session's first."""
        live = self._live.get(key >> _POSITION_BITS)
        return None if live is None else live.name(key & _POSITION)

    def _session(self, number: int) -> TraceSession:
        return self._trace.sessions[self._parts[number].source]

    def _open(self, number: int) -> LiveSession:
        part = self._parts[number]
        if not self._has_copies:
            course = Course(self._session(number), part.turns, self.block_tokens)
        else:
            known = self._courses.get((part.source, part.turns))
            course = known or Course(self._session(number), part.turns, self.block_tokens)
            self._courses[part.source, part.turns] = course
        live = LiveSession(number, course, self._ids.of_session(number, part))
        self._live[number] = live
        return live

    def _begin(self, number: int, start_s: float) -> list[tuple[float, ReleaseKey]]:
        """Release what waits for nothing, at its offset in the session."""
        session, scale = self._session(number), self._shape.tool_scale
        return [
            (start_s + scale * session.requests[position].start_s, _key(number, position))
            for position in roots(session, self._parts[number].turns)
        ]

    def _next_session(self, now: float) -> list[tuple[float, ReleaseKey]]:
        if self._started == self.sessions:
            return []
        self._started += 1
        return self._begin(self._started - 1, now)

    def _all_recorded(self) -> list[tuple[float, ReleaseKey]]:
        return [
            (self._recorded_s(number, request.start_s), _key(number, position))
            for number, part in enumerate(self._parts)
            for position, request in enumerate(self._session(number).requests[: part.turns])
        ]

    def _recorded_s(self, number: int, offset_s: float) -> float:
        return self._origin_s + self._parts[number].start_s + self._shape.time_scale * offset_s


def _key(number: int, position: int) -> ReleaseKey:
    return ReleaseKey(number << _POSITION_BITS | position)
