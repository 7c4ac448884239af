"""A workload driven step by step through a real engine, released as the simulator releases it.

Owns the order: who joins in which step. No clock: think times are nothing, so which turn comes
next follows from steps alone, and a replay is the same every time. A turn set free by a step joins
behind the next one where the engine goes on, as a client's next request would, and at once where
it stands still. Runs in whichever environment the engine needs; knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.workload import Capped, WorkloadDriver, WorkloadShape
from ownerserve.trace.model import Run, Trace
from ownerserve.trace.runs import expand
from ownerserve.trace.transform import keep, scale_lengths

PRINTABLE = (0x20, 0x7F)
"""Of the tiny models' byte tokenizer."""
LONGEST_STEPS = 1_000_000


class Asked(NamedTuple):
    """A request as an engine takes it."""

    name: str
    session: str
    tokens: list[int]
    answer_tokens: int


class SteppedEngine(Protocol):
    """What is replayed against."""

    def submit(self, asked: Asked) -> None: ...
    def step(self) -> list[str]:
        """One forward pass; names of those that have ended, in order."""

    @property
    def has_work(self) -> bool: ...


class Replayed(msgspec.Struct):
    """What came of a replay. `cached`: tokens a request found, by `session/position`."""

    cached: dict[str, int]
    steps: int
    evicted_blocks: int = 0
    preemptions: int = 0
    prefill_only_steps: int = 0
    """Steps that gave nobody a token."""


class Case(msgspec.Struct, frozen=True):
    """What is replayed and on which engine: `blocks` of the trace's block length."""

    trace: Trace
    lanes: int
    blocks: int
    step_tokens: int
    running: int

    @property
    def shape(self) -> WorkloadShape:
        return WorkloadShape(mode=Capped(self.lanes), tool_scale=0.0, output_reuse="never")


def scaled(
    trace: Trace, *, divide: int, block_tokens: int, sessions: int, turns: int, longest: int
) -> Trace:
    """The first sessions, lengths divided, in blocks of the engine's length; turns from the first
    whose prompt is longer than `longest` on are left out."""
    small = scale_lengths(keep(trace, sessions=sessions, turns=turns), factor=1.0 / divide)
    group = block_tokens // small.block_tokens
    assert group * small.block_tokens == block_tokens, "choose a divisor that fits the block"
    found = []
    for session in small.sessions:
        requests = []
        for request in session.requests:
            if request.input_tokens + request.output_tokens > longest:
                break
            runs = _runs(list(expand(request.runs))[group - 1 :: group])
            requests.append(msgspec.structs.replace(request, runs=runs))
        found.append(msgspec.structs.replace(session, requests=tuple(requests)))
    kept = tuple(session for session in found if session.requests)
    return msgspec.structs.replace(small, block_tokens=block_tokens, sessions=kept)


def _runs(ids: Iterable[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for id_ in ids:
        if runs and sum(runs[-1]) == id_:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((id_, 1))
    return tuple(runs)


@cache
def unit_text(unit: int, tokens: int) -> tuple[int, ...]:
    """The tokens that a unit stands for: equal for equal ids, and for no others."""
    return tuple(np.random.default_rng(unit).integers(*PRINTABLE, tokens).tolist())


def asked_of(turn: SimTurn, block_tokens: int) -> Asked:
    units = np.frombuffer(turn.prompt, "<u4")
    assert len(turn.prompt) == TOKEN_BYTES * len(units)
    tokens = [token for unit in units.tolist() for token in unit_text(unit, block_tokens)]
    return Asked(
        f"{turn.session}/{turn.position}",
        str(turn.name),
        tokens[: turn.prompt_tokens],
        turn.output_tokens,
    )


def replay(case: Case, engine: SteppedEngine) -> int:
    """All of the case's turns through `engine`; returns the steps it took."""
    workload = WorkloadDriver.of(case.trace, case.shape)
    turns: dict[str, SimTurn] = {}

    def join(keys: list[tuple[float, object]]) -> None:
        for _, key in keys:
            turn = workload.turn(key, 0.0)  # type: ignore[arg-type]
            asked = asked_of(turn, workload.block_tokens)
            turns[asked.name] = turn
            engine.submit(asked)

    waiting: list[tuple[float, object]] = list(workload.first(0.0))
    steps = 0
    while waiting or engine.has_work:
        if not engine.has_work:
            join(waiting)
            waiting = []
        freed: list[tuple[float, object]] = []
        for name in engine.step():
            freed += workload.finished(turns.pop(name), 0.0)
        join(waiting)
        waiting = freed
        steps += 1
        if steps > LONGEST_STEPS:
            raise RuntimeError(f"{len(turns)} turns do not end")
    return steps
