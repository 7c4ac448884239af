"""This module makes the workloads by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.model import Trace, TraceSession
from ownerserve.trace.synth.coding_agent import CodingAgent
from ownerserve.trace.synth.conversation import (
    CHAT,
    LONGDOC,
    SWE,
    SWE_LONG,
    THINKING,
    Conversations,
)
from ownerserve.trace.synth.options import Options, Plan, stream
from ownerserve.trace.synth.rollouts import Rollouts


class Maker(Protocol):
    """A maker makes the sessions of one workload, in order."""

    def session(self, number: int, weight: float, *, rng: np.random.Generator) -> TraceSession:
        """Make session `number`, whose share of the arrivals is `weight`."""
        ...


class Workload(NamedTuple):
    about: str
    make: Callable[[Options], Maker]


WORKLOADS: dict[str, Workload] = {
    "coding-agent": Workload(
        "long tool loops with sub-agents, calibrated to 570 Claude-Code sessions", CodingAgent
    ),
    "chat": Workload(
        "people talking, lengths and gaps of Mooncake's conversation trace",
        partial(Conversations, CHAT),
    ),
    "thinking": Workload(
        "short questions, answers of thousands of tokens (assumed)",
        partial(Conversations, THINKING),
    ),
    "swe": Workload(
        "SWE-like multi-turn tasks with fast tools, as mini-swe-agent runs",
        partial(Conversations, SWE),
    ),
    "swe-long": Workload(
        "SWE-bench runs of the length seed 003 tells of: about 85 turns, contexts to 100k",
        partial(Conversations, SWE_LONG),
    ),
    "rollouts": Workload("8 forked samples of one task prefix, each in its tool loop", Rollouts),
    "longdoc": Workload(
        "questions on long documents; skew is the documents' popularity",
        partial(Conversations, LONGDOC),
    ),
}


def generate(
    workload: str, options: Options, *, on_session: Callable[[], None] | None = None
) -> Trace:
    """Make a trace of `options.sessions` sessions: the same for the same arguments, byte for byte.

    `on_session` is called after each one. Raises InvalidInput for an unknown workload or an
    option out of range.
    """
    options.check()
    if workload not in WORKLOADS:
        raise InvalidInput("workload", f"{workload!r} is unknown", f"use {', '.join(WORKLOADS)}")
    plan = Plan(options)
    maker = WORKLOADS[workload].make(options)
    sessions = []
    for number, start_s in enumerate(plan.start_s):
        rng = stream(options.seed, number + 1)
        session = maker.session(number, plan.weight[number], rng=rng)
        sessions.append(msgspec.structs.replace(session, start_s=start_s))
        if on_session is not None:
            on_session()
    return Trace(
        name=workload,
        origin=f"generate {workload} {msgspec.json.encode(options).decode()}",
        block_tokens=options.block_tokens,
        ids="trace",
        grouping="recorded",
        arrivals="recorded",
        sessions=tuple(sessions),
    )
