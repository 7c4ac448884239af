"""Whose sessions are played, how many at once, in how much memory: four families of two regimes.

    family          GPUs while tools run    its sessions
    claude-code     idle                    the shared recording, without the 96 on which was fitted
    agentic-code    busy                    files of `aiperf synthesize agentic-code` (--aiperf)
    mini-swe        busy                    generated (swe-long), as mini-swe-agent runs
    drawn           either                  generated anew for each draw: kind, skew, tools drawn

What the knee is follows from a trace and the memory alone, never from a result: as many sessions as
fit with their mean contexts. Loads are multiples of it. Where contexts are small memory is cut, so
that runs of all families are of about one size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.fleet import WORKERS
from ownerserve.sim.suites.traces import find
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options

TOKEN_BYTES = 98_304
"""A token's state of Qwen3-30B-A3B."""
KV_BYTES = 72_000_000_000
"""For state on an H200 beside those weights."""
KNEE_MOST = 24
ROOM = 1.1
"""A worker's memory in longest contexts, at least: every turn must fit somewhere."""
LOADS = {"below": 0.75, "knee": 1.1, "past": 1.5, "above": 2.5, "beyond": 4.0}
ABOVE = ("above", "beyond")
"""Loads at which five per cent more work than the best rival's is wanted, at one of them."""
SESSIONS_LEAST = 48
SESSIONS_A_LANE = 2
QUICK_SESSIONS, QUICK_TOKENS, QUICK_KNEE = 12, 60_000, 6


class Case(NamedTuple):
    """A case is one fleet's work: the first half of what sets a run, the contender is the other."""

    family: str
    load: str
    draw: int
    lanes: int
    sessions: int
    kv_bytes: int
    host_bytes: int = 0
    """Host memory behind each worker."""


def mean_context(trace: Trace) -> float:
    """Return the mean over sessions of their turns' mean prompt, in tokens."""
    return fmean(
        fmean(request.input_tokens for request in session.requests)
        for session in trace.sessions
        if session.requests
    )


def longest_context(trace: Trace) -> int:
    """Return the most tokens that a turn leaves behind."""
    return max(
        request.input_tokens + request.output_tokens
        for session in trace.sessions
        for request in session.requests
    )


def cases(
    name: str, trace: Trace, draw: int, *, loads: Sequence[str], scale: Scale = Scale.FULL
) -> Iterator[Case]:
    """Yield the loads of one draw of a family."""
    context_bytes = mean_context(trace) * TOKEN_BYTES
    most = scale.of(KNEE_MOST, QUICK_KNEE)
    enough = max(most * context_bytes / WORKERS, ROOM * longest_context(trace) * TOKEN_BYTES)
    kv_bytes = min(KV_BYTES, round(enough))
    knee = WORKERS * kv_bytes / context_bytes
    for load in loads:
        lanes = max(1, round(LOADS[load] * knee))
        sessions = scale.of(max(SESSIONS_LEAST, SESSIONS_A_LANE * lanes), QUICK_SESSIONS)
        yield Case(name, load, draw, lanes, sessions, kv_bytes)


class Sources(NamedTuple):
    """Sources are where sessions come from."""

    traces: Path | None
    aiperf: Sequence[Path] = ()
    scale: Scale = Scale.FULL

    @property
    def families(self) -> tuple[str, ...]:
        """The families whose sessions are to be had."""
        return tuple(name for name in FAMILIES if name != "agentic-code" or self.aiperf)

    def trace(self, family: str, draw: int) -> Trace:
        """Return the sessions that a draw of the family is drawn from. Raises InvalidInput."""
        if family == "claude-code":
            return find("held_out", self.traces, self.scale)[0]
        if family == "agentic-code":
            return read_trace(self.aiperf[draw % len(self.aiperf)])
        if family == "mini-swe":
            return generate("swe-long", self._sized(Options(sessions=200, seed=1000 + draw)))
        return drawn_anew(draw, scale=self.scale)

    def _sized(self, options: Options) -> Options:
        return _quick(options) if self.scale is Scale.QUICK else options


FAMILIES = ("claude-code", "agentic-code", "mini-swe", "drawn")


def drawn_anew(draw: int, *, scale: Scale = Scale.FULL) -> Trace:
    """Return a trace whose kind, skew and tools nobody chose."""
    chance = random.Random(f"goal {draw}")
    kind = chance.choice(("coding-agent", "swe-long"))
    options = Options(
        sessions=160,
        seed=chance.randrange(1 << 31),
        skew=round(chance.uniform(0.0, 0.8), 2),
        tool_time=round(2.0 ** chance.uniform(-2.0, 2.0), 2),
        reuse=round(chance.uniform(0.9, 1.0), 2),
        max_input_tokens=chance.choice((200_000, 400_000, 1_000_000)),
    )
    return generate(kind, _quick(options) if scale is Scale.QUICK else options)


def _quick(options: Options) -> Options:
    return msgspec.structs.replace(options, sessions=QUICK_SESSIONS, max_input_tokens=QUICK_TOKENS)
