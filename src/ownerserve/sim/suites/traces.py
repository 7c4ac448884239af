"""This module says which trace stands for a role: the shared one where it is to be had, else a
generated one.

Owns the roles. A stand-in is made by trace.synth and is named as such in every verdict.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.suites.base import Origin, Scale
from ownerserve.sim.workload import Sample, WorkloadShape
from ownerserve.sim.workload.cast import cast
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options

QUICK_SESSIONS = 12
QUICK_INPUT_TOKENS = 60_000


class TraceRole(msgspec.Struct, frozen=True):
    """A role says which trace is meant, and what stands in for it.

    `path` in --traces, "" for a role that is always generated; else the stand-in's workload.
    `without`: so many sessions are left out, those that seed 0 draws: the fitted ones.
    """

    path: str
    workload: str
    options: Options
    without: int = 0


FITTED = 96
"""Sessions that seed 0 draws of the Claude-Code trace: on them shares of seats, gates and patience
were chosen. What is claimed of policies is tested on the others."""
CLAUDE_CODE = "claude-code-weka/sessions.jsonl.zst"

ROLES = {
    "claude_code": TraceRole(CLAUDE_CODE, "coding-agent", Options(sessions=300)),
    "held_out": TraceRole(CLAUDE_CODE, "coding-agent", Options(sessions=300), without=FITTED),
    "held_out_generated": TraceRole(
        "", "coding-agent", Options(sessions=200, seed=77, tool_time=0.5)
    ),
    "mooncake_conversation": TraceRole(
        "mooncake-fast25/conversation_trace.jsonl.zst",
        "chat",
        Options(sessions=4000, arrivals_per_s=1.2, block_tokens=512),
    ),
    "mooncake_synthetic": TraceRole(
        "mooncake-fast25/synthetic_trace.jsonl.zst",
        "longdoc",
        Options(sessions=800, arrivals_per_s=0.5, block_tokens=512),
    ),
    "miniswe": TraceRole("lmcache-agent/miniswe.jsonl.zst", "swe", Options(sessions=20)),
    "taubench": TraceRole("lmcache-agent/taubench.jsonl.zst", "chat", Options(sessions=40)),
    "coding_agent": TraceRole("", "coding-agent", Options(sessions=120)),
    "swe": TraceRole("", "swe", Options(sessions=200)),
    "swe_long": TraceRole("", "swe-long", Options(sessions=52, arrivals_per_s=1.0)),
    "rollouts": TraceRole("", "rollouts", Options(sessions=24)),
    "longdoc": TraceRole("", "longdoc", Options(sessions=200)),
}
"""What an experiment may name as its trace."""


def find(role: str, folder: Path | None, scale: Scale) -> tuple[Trace, Origin]:
    """Find the trace for `role`. Quick: always a small generated one, so that it takes a second.

    Raises InvalidInput for an unknown role or a file that is broken.
    """
    if role not in ROLES:
        raise InvalidInput("trace", f"{role!r} is unknown", f"use {', '.join(ROLES)}")
    told = ROLES[role]
    path = folder / told.path if folder is not None and told.path else None
    if scale is Scale.FULL and path is not None and path.exists():
        trace, is_generated = read_trace(path), False
    else:
        trace, is_generated = generate(told.workload, _sized(told.options, scale)), True
    if told.without and len(trace.sessions) > 2 * told.without:
        trace = held_out(trace, told.without)
    return trace, Origin(
        role,
        len(trace.sessions),
        trace.request_count,
        is_generated,
    )


def held_out(trace: Trace, fitted: int) -> Trace:
    """Return the trace's sessions that seed 0 does not draw."""
    drawn = {part.source for part in cast(trace, WorkloadShape(sessions=Sample(fitted)))}
    left = (one for number, one in enumerate(trace.sessions) if number not in drawn)
    return msgspec.structs.replace(trace, sessions=tuple(left))


def _sized(options: Options, scale: Scale) -> Options:
    if scale is Scale.FULL:
        return options
    return msgspec.structs.replace(
        options, sessions=QUICK_SESSIONS, max_input_tokens=QUICK_INPUT_TOKENS
    )
