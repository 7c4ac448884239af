"""A course is what stands fixed of a session: what waits for what, and which units each turn
touches.

Owns what is the same every time a session runs; copies of a session share it. Never changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ownerserve.sim.workload.unit_ids import UnitSpan
from ownerserve.trace.model import TraceRequest, TraceSession, release_delay_s, waits_for


class Course:
    """A course is the first `turns` requests of a session, by position."""

    __slots__ = (
        "__weakref__",
        "followers",
        "following",
        "fresh",
        "openings",
        "requests",
        "session",
        "spans",
        "waits",
    )

    def __init__(self, session: TraceSession, turns: int, unit_tokens: int) -> None:
        self.session = session
        self.requests = session.requests[:turns]
        self.waits = [tuple(dict.fromkeys(waits)) for waits in waits_for(session)[:turns]]
        """The requests that each waits for, none twice."""
        self.followers = _followers(self.waits)
        """The requests that wait for each, ascending."""
        self.following = _next_of_agent(self.requests)
        """The next request of the same agent; 0, which comes after none, for its last."""
        self.openings = frozenset(range(1, turns)).difference(self.following)
        """The first requests of all agents but the one that begins the session."""
        self.spans = [UnitSpan.of(request, unit_tokens) for request in self.requests]
        needs = map(UnitSpan.fresh_at_most, self.spans, self.requests)
        self.fresh = list(accumulate(needs, initial=0))
        """Where the fresh ids of each begin, from those of the session."""

    def delay_s(self, position: int) -> float:
        """Return the recorded seconds from the last thing that a turn waits for to its release."""
        return release_delay_s(self.session, position, self.waits[position])

    def away_s(self, position: int) -> float:
        """Return the recorded seconds from the end of a turn to its agent's next one.

        What else that one waits for (sub-agents, mostly) is included.
        """
        following = self.following[position]
        this, then = self.requests[position], self.requests[following]
        recorded_s = then.start_s - this.start_s - (this.api_s or 0.0)
        return max(self.delay_s(following), recorded_s)


def _followers(waits: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    followers: list[tuple[int, ...]] = [() for _ in waits]
    for position, earlier in enumerate(waits):
        for wait in earlier:
            followers[wait] += (position,)
    return followers


def _next_of_agent(requests: tuple[TraceRequest, ...]) -> list[int]:
    following = [0] * len(requests)
    last: dict[int, int] = {}
    for position, request in enumerate(requests):
        previous = last.get(request.agent)
        if previous is not None:
            following[previous] = position
        last[request.agent] = position
    return following


def roots(session: TraceSession, turns: int) -> Iterator[int]:
    """Yield the positions of the requests that wait for nothing: as trace.model.waits_for, but
    lazily."""
    seen: set[int] = set()
    for position, request in enumerate(session.requests[:turns]):
        waits_for_previous = request.after is None and request.agent in seen
        if not waits_for_previous and not request.after:
            yield position
        seen.add(request.agent)
