"""A shape says how a trace is driven: the choices a sweep varies, as plain data. Decides nothing
itself."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Literal

import msgspec

from ownerserve.kv.errors import InvalidInput


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """In this mode a turn is released when the turns it waits for are done and its think time has
    passed."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """In this mode every turn is released at its recorded time, whatever completes."""


class Capped(msgspec.Struct, frozen=True, tag="capped"):
    """This mode is closed, with at most `lanes` sessions at once: the next starts when one ends.

    Recorded starts of sessions are ignored.
    """

    lanes: int


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """Sessions arrive as the trace says; at once where it does not say."""


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Sessions arrive independently, `per_s` of them a second."""

    per_s: float


class First(msgspec.Struct, frozen=True, tag="first"):
    """This choice takes the first `count` sessions of the trace."""

    count: int


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """This choice draws `count` sessions by the seed: none twice before each was drawn once.

    A session drawn again is a copy with ids of its own, but for what it shared with other
    sessions. So `count` may exceed the trace.
    """

    count: int


class Zipf(msgspec.Struct, frozen=True, tag="zipf"):
    """The session of rank r ends before its input exceeds r ** -alpha of the largest session's.

    Sessions are only ever cut from the end, never lengthened: total input falls as alpha grows.
    """

    alpha: float


class TopShare(msgspec.Struct, frozen=True, tag="top_share"):
    """This skew is Zipf's, with the smallest alpha at which `top` of the sessions hold `share` of
    the input."""

    share: float
    top: float = 0.01


class SharedHeads(msgspec.Struct, frozen=True, tag="shared_heads"):
    """Where ids are local to a session, agents of equal (tools, system, model) begin alike.

    An estimate: that two heads of equal sizes hold the same text was never recorded. Within a
    session the recorded ids decide.
    """


OutputReuse = Literal["next_prompt", "never"]
"""`next_prompt`: what a turn decoded is what the agent's next prompt shows behind the common
prefix, where it goes on from there. `never`: nobody asks for decoded state again."""


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's shape has every choice of how a trace is driven.

    `time_scale`: factor on recorded arrivals. `tool_scale`: factor on think times and on offsets in
    a session (0: coupled). `unit_tokens`: a unit where the trace has no ids.
    """

    mode: Closed | Open | Capped = Closed()
    arrivals: Recorded | Poisson = Recorded()
    sessions: First | Sample | None = None
    skew: Zipf | TopShare | None = None
    shared_heads: SharedHeads | None = None
    output_reuse: OutputReuse = "next_prompt"
    time_scale: float = 1.0
    tool_scale: float = 1.0
    unit_tokens: int = 64
    seed: int = 0

    def check(self) -> None:
        """Raise InvalidInput naming the first choice out of range."""
        for field, value, holds, mend in _checks(self):
            if not holds:
                raise InvalidInput(field, f"{value} is out of range", mend)


def _checks(shape: WorkloadShape) -> Iterator[tuple[str, float, bool, str]]:
    """Yield (field, value, whether it is in range, mend) for each choice."""
    mode, arrivals, skew = shape.mode, shape.arrivals, shape.skew
    if isinstance(mode, Capped):
        yield "mode.lanes", mode.lanes, mode.lanes >= 1, "use 1 or more"
    if isinstance(arrivals, Poisson):
        per_s = arrivals.per_s
        yield "arrivals.per_s", per_s, 0 < per_s < inf, "use more than 0"
    if shape.sessions is not None:
        count = shape.sessions.count
        yield "sessions.count", count, count >= 1, "use 1 or more"
    if isinstance(skew, Zipf):
        yield "skew.alpha", skew.alpha, 0 <= skew.alpha < inf, "use 0 or more"
    if isinstance(skew, TopShare):
        yield "skew.share", skew.share, 0 < skew.share < 1, "use between 0 and 1"
        yield "skew.top", skew.top, 0 < skew.top < 1, "use between 0 and 1"
    yield "time_scale", shape.time_scale, 0 <= shape.time_scale < inf, "use 0 or more"
    yield "tool_scale", shape.tool_scale, 0 <= shape.tool_scale < inf, "use 0 or more"
    yield "unit_tokens", shape.unit_tokens, shape.unit_tokens >= 1, "use 1 or more"
