"""A trace has sessions, and sessions have requests: who asked for what, after what, sharing which
prefix.

Owns the shape of a workload. Holds no text and no tokens: a prompt is its length and the ids of its
token blocks. Ids are *chained*: an id stands for its block and everything before it, so two prompts
that share an id share the whole prefix up to it, and an id has one position only.

A session is a graph, not a list: a request is released `think_s` after the last of the requests it
waits for. Sub-agents are agents of their parent's session.

      main   0 ──── 1 ─────────────── 5       requests[1].stop == "tool_use": spawns two sub-agents
                    ├─ explore  2 ─ 4 ┤       requests[2].after == requests[3].after == (1,)
                    └─ plan     3 ────┘       requests[5].after == (1, 3, 4)
"""

from __future__ import annotations

from typing import Literal

import msgspec

Run = tuple[int, int]
"""(first id, count): the ids first, first + 1, ... first + count - 1."""

Runs = tuple[Run, ...]
"""The ids of a prompt's blocks, in order."""

IdScope = Literal["trace", "session", "none"]
"""Where equal block ids mean equal prefixes; `none`: the trace has no ids."""

Grouping = Literal["recorded", "inferred", "unknown"]
"""Where the sessions come from; `unknown`: every request stands in a session of its own."""

Arrivals = Literal["recorded", "unknown"]
"""Whether `TraceSession.start_s` was recorded (else it is 0 and sessions have no order in time)."""


class Agent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An agent is one of a session's conversations: agent 0 is the main one, others were spawned by
    it.

    `tool_tokens` + `system_tokens` is the head of its prompts that other sessions may share.
    """

    name: str = ""
    kind: str = ""
    model: str = ""
    tool_tokens: int = 0
    system_tokens: int = 0


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A request is one turn: a prompt, an answer, and when they happened.

    `start_s` counts from the session's start. `after` names, by position in the session, the
    requests that must finish before this one is released; None means: the previous request of
    the same agent, if there is one. `think_s` is the recorded time from the finish of the last of
    them to this start (a tool's time after stop reason `tool_use`, a person's after `end_turn`).
    `runs` covers the prompt's full blocks, or its last, partial block too (Mooncake).
    """

    start_s: float
    input_tokens: int
    output_tokens: int
    runs: Runs = ()
    agent: int = 0
    after: tuple[int, ...] | None = None
    think_s: float | None = None
    api_s: float | None = None
    ttft_s: float | None = None
    stop: str = ""
    model: str = ""
    kind: str = ""


class TraceSession(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A session is an agent's run: requests in order of their start, waiting only for earlier
    ones."""

    id: str
    requests: tuple[TraceRequest, ...]
    start_s: float = 0.0
    agents: tuple[Agent, ...] = (Agent(),)


class Trace(msgspec.Struct, frozen=True):
    """A trace is a workload. `origin` names the format it was read from, or the generator and its
    seed."""

    name: str
    origin: str
    block_tokens: int
    ids: IdScope
    grouping: Grouping
    arrivals: Arrivals
    sessions: tuple[TraceSession, ...]

    @property
    def request_count(self) -> int:
        """`request_count` counts the requests of all sessions."""
        return sum(len(session.requests) for session in self.sessions)

    @property
    def input_tokens(self) -> int:
        """`input_tokens` counts those of all requests."""
        return sum(r.input_tokens for session in self.sessions for r in session.requests)


def waits_for(session: TraceSession) -> list[tuple[int, ...]]:
    """Return, for each request, the positions of the requests that must finish before it is
    released."""
    last_of_agent: dict[int, int] = {}
    waits = []
    for position, request in enumerate(session.requests):
        if request.after is not None:
            waits.append(request.after)
        else:
            previous = last_of_agent.get(request.agent)
            waits.append(() if previous is None else (previous,))
        last_of_agent[request.agent] = position
    return waits


def release_delay_s(session: TraceSession, position: int, waits: tuple[int, ...]) -> float:
    """Return the seconds from the finish of what a request waits for to its release, as best known.

    `think_s` where recorded; else the recorded gap between the starts, less the service time
    where that was recorded. A request that waits for nothing is released at its `start_s`.
    """
    request = session.requests[position]
    if not waits:
        return request.start_s
    if request.think_s is not None:
        return request.think_s
    finish_s = max(session.requests[w].start_s + (session.requests[w].api_s or 0.0) for w in waits)
    return max(0.0, request.start_s - finish_s)


def fault(session: TraceSession) -> str | None:
    """Return what is inconsistent in a session, or None: order, waits and agents must agree."""
    previous_start_s = 0.0
    for position, request in enumerate(session.requests):
        if request.start_s < previous_start_s:
            return f"requests[{position}] starts before the one listed ahead of it"
        previous_start_s = request.start_s
        if not 0 <= request.agent < len(session.agents):
            return f"requests[{position}].agent is {request.agent} of {len(session.agents)} agents"
        if request.after and not 0 <= min(request.after) <= max(request.after) < position:
            return f"requests[{position}].after must name earlier requests"
        if request.input_tokens < 0 or request.output_tokens < 0:
            return f"requests[{position}] has a negative length"
        if any(count <= 0 or first < 0 for first, count in request.runs):
            return f"requests[{position}].runs has an empty or negative run"
    return None
