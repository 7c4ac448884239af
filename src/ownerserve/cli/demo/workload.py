"""This module makes a trace's sessions conversations that can be sent: messages with text of the
right length.

Keeps what decides re-use: how each agent's context grows and restarts, which heads sessions share,
who waits for whom, tool gaps. One character is one token of the tiny models' byte-level tokenizer.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from ownerserve.trace.model import Trace, TraceRequest, TraceSession, release_delay_s, waits_for
from ownerserve.trace.runs import common_prefix

Transcript = dict[tuple[str, int], str]
"""(session, turn) -> what the assistant said there, in the run that came first."""

MARKUP_TOKENS = 4
"""What the chat template adds around one message, at most: the length to leave out of its text."""

_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)


class Message(msgspec.Struct, frozen=True):
    role: str
    text: str


class DemoTurn(msgspec.Struct, frozen=True):
    """A turn is one request: what it adds to its agent's context, after whom it goes and how long
    it waits.

    `restart`: the agent's context is dropped first (a compaction, or its first turn). `is_last`: of
    its agent, which says so, and whose memory and seat are then free for others.
    """

    agent: str
    messages: tuple[Message, ...]
    output_tokens: int
    after: tuple[int, ...]
    gap_s: float
    restart: bool
    is_last: bool


class Conversation(msgspec.Struct, frozen=True):
    """A conversation is a session; turn i is released `gap_s` after the last turn named in its
    `after` ended."""

    session: str
    start_s: float
    turns: tuple[DemoTurn, ...]


def unserved_s(conversation: Conversation) -> float:
    """Return how many seconds it takes when answers cost no time: arrivals and tool gaps."""
    ends: list[float] = []
    for turn in conversation.turns:
        ends.append(max((ends[i] for i in turn.after), default=0.0) + turn.gap_s)
    return conversation.start_s + max(ends, default=0.0)


def text_of(seed: str, length: int) -> str:
    """Return `length` characters of filler, always the same for a seed."""
    digest = hashlib.sha256(seed.encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    return rng.choice(_ALPHABET, size=max(0, length)).tobytes().decode("ascii")


def conversations(trace: Trace, *, time_scale: float) -> list[Conversation]:
    """Make one conversation a session; recorded times are multiplied by `time_scale`."""
    return [
        Conversation(session.id, session.start_s * time_scale, _turns(session, trace, time_scale))
        for session in trace.sessions
    ]


def _turns(session: TraceSession, trace: Trace, time_scale: float) -> tuple[DemoTurn, ...]:
    turns = []
    previous: dict[int, TraceRequest] = {}
    last = {request.agent: position for position, request in enumerate(session.requests)}
    for position, (request, waits) in enumerate(
        zip(session.requests, waits_for(session), strict=True)
    ):
        before = previous.get(request.agent)
        restart = before is None or not _extends(before, request, trace.block_tokens)
        turns.append(
            DemoTurn(
                agent=_agent_key(session, request.agent),
                messages=_messages(session, position, None if restart else before),
                output_tokens=max(1, request.output_tokens),
                after=waits,
                gap_s=release_delay_s(session, position, waits) * time_scale,
                restart=restart,
                is_last=last[request.agent] == position,
            )
        )
        previous[request.agent] = request
    return tuple(turns)


def _extends(before: TraceRequest, request: TraceRequest, block_tokens: int) -> bool:
    """Return whether a prompt is the one before it, the answer, and something more."""
    if request.input_tokens < before.input_tokens + before.output_tokens:
        return False
    whole_blocks = before.input_tokens // block_tokens
    return not before.runs or common_prefix(before.runs, request.runs) >= whole_blocks


def _messages(
    session: TraceSession, position: int, before: TraceRequest | None
) -> tuple[Message, ...]:
    request = session.requests[position]
    if before is not None:
        added = request.input_tokens - before.input_tokens - before.output_tokens
        body = text_of(f"{session.id}/{position}", added - 2 * MARKUP_TOKENS)
        return (Message("tool" if before.stop == "tool_use" else "user", body),)
    agent = session.agents[request.agent]
    head = agent.tool_tokens + agent.system_tokens
    head = min(head, request.input_tokens)
    rest = request.input_tokens - head
    return (
        Message(
            "system", text_of(f"{agent.tool_tokens}/{agent.system_tokens}/{agent.model}", head)
        ),
        Message("user", text_of(f"{session.id}/{position}", rest - 3 * MARKUP_TOKENS)),
    )


def _agent_key(session: TraceSession, agent: int) -> str:
    return session.id if agent == 0 else f"{session.id}/{agent}"
