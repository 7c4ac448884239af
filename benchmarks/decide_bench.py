"""What a routing decision costs: CPU time of RouterState.handle, and memory for each session.

    python benchmarks/decide_bench.py [--sessions N]

A fleet of 4, 64 and 1,024 workers that stamp their load, 10^5 sessions with a finished turn each.
Timed are batches of 32 arrivals (process CPU time; median over batches): "decide" is the question
and the policy's answer, "arrive" the whole event with its books, "end" a first byte and a Done.
"calm": the owner is not hot; "hot": it is, so that every way is priced.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from pathlib import Path
from statistics import median

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.learning import Learning
from ownerserve.router.messages import (
    Arrive,
    Dispatch,
    Done,
    FirstByte,
    SessionEnd,
    Stamped,
    WorkerUp,
)
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.state import RouterState, ask
from ownerserve.router.worker import EVERY_ACTION, Profile
from result import Row, report

BATCH, ROUNDS = 32, 60
CONTEXT_BYTES, TURN_BYTES = 440_000, 3_032
GIB = 1 << 30
GOALS_US = {64: "<= 5", 1024: "<= 10"}
PROFILE = Profile(model="m", actions=EVERY_ACTION, kv_bytes_total=100 * GIB)


class World:
    """A state with workers and sessions, and the clock."""

    def __init__(self, policy: str, *, workers: int, sessions: int) -> None:
        self.policy = make_policy(policy)
        self.state = RouterState(self.policy, learning=Learning(spilled_to=Tier.DISK))
        self.draw = random.Random(7)
        self.now_s = 0.0
        for number in range(workers):
            worker = WorkerId(f"10.0.{number // 256}.{number % 256}:8000")
            self.state.handle(WorkerUp(worker, 0, Incarnation(1), PROFILE), 0.0)
        self.workers = list(self.state.fleet)
        self.names = [SessionId(f"tenant/x-session-id/{number:032x}") for number in range(sessions)]
        for name in self.names:
            self.finish([self.arrive(name)])

    def arrive(self, name: SessionId, *, parent: SessionId | None = None) -> Dispatch:
        self.now_s += 1e-4
        session = self.state.sessions.get(name)
        turns = 0 if session is None else session.turns
        event = Arrive(name, CONTEXT_BYTES + turns * TURN_BYTES, model="m", parent=parent)
        outcome = self.state.handle(event, self.now_s)
        assert isinstance(outcome, Dispatch)
        return outcome

    def finish(self, dispatches: list[Dispatch]) -> None:
        for dispatch in dispatches:
            self.state.handle(FirstByte(dispatch.receipt), self.now_s)
            usage = Usage(dispatch.prompt_tokens, 256, 0)
            self.state.handle(Done(dispatch.receipt, usage), self.now_s)

    def stamp(self, pending: int) -> None:
        """Some workers, two for each arrival, say that they have `pending` tokens before them."""
        self.now_s += 1.0
        for worker in self.draw.sample(self.workers, min(2 * BATCH, len(self.workers))):
            some = int(pending * self.draw.uniform(0.7, 1.3))
            unit = RoutingUnit(worker.id, 0, Incarnation(1))
            status = WorkerLoad(unit, self.now_s, some, 8, 0, 40 * GIB, 100 * GIB)
            self.state.handle(Stamped(status), self.now_s)


def arrive_us(world: World, events: list[Arrive]) -> tuple[float, list[Dispatch]]:
    """CPU us for each of `events`, and their outcomes."""
    handle, now_s = world.state.handle, world.now_s
    began = time.process_time_ns()
    outcomes = [handle(event, now_s) for event in events]
    took = time.process_time_ns() - began
    return took / len(events) / 1e3, [one for one in outcomes if isinstance(one, Dispatch)]


def answer_us(world: World, events: list[Arrive]) -> float:
    """CPU us of the question and its answer alone, for sessions that exist."""
    decide, now_s = world.policy.decide, world.now_s
    candidates = world.state.fleet.candidates("m")
    sessions = [world.state.sessions.get(SessionId(event.session or "")) for event in events]
    began = time.process_time_ns()
    for event, session in zip(events, sessions, strict=True):
        decide(ask(event, session, candidates, limits=DEFAULTS, now_s=now_s), candidates)
    return (time.process_time_ns() - began) / len(events) / 1e3


def decide_us(world: World, case: str) -> tuple[float, float]:
    """Median CPU us of one arrival of that kind: the answer alone, and all of it."""
    answers, arrivals = [], []
    for number in range(ROUNDS):
        world.stamp(0 if case == "calm" else 40_000)
        if case == "hot":
            heat_owners_of = world.draw.sample(world.names, BATCH)
            events = [arrival(world, name) for name in heat_owners_of]
            for name in heat_owners_of:
                heat(world, name)
        elif case == "calm":
            events = [arrival(world, name) for name in world.draw.sample(world.names, BATCH)]
        else:
            parent = world.names[number] if case == "fork" else None
            events = [
                Arrive(SessionId(f"new-{number}-{k}"), CONTEXT_BYTES, model="m", parent=parent)
                for k in range(BATCH)
            ]
        answers.append(answer_us(world, events))
        took_us, dispatches = arrive_us(world, events)
        arrivals.append(took_us)
        world.finish(dispatches)
        if case in ("new", "fork"):
            for event in events:
                assert event.session is not None
                world.state.handle(SessionEnd(event.session), world.now_s)
    return median(answers), median(arrivals)


def arrival(world: World, name: SessionId) -> Arrive:
    session = world.state.sessions.get(name)
    assert session is not None
    return Arrive(name, CONTEXT_BYTES + session.turns * TURN_BYTES, model="m")


def heat(world: World, name: SessionId) -> None:
    """The owner of `name` says that it is very busy."""
    session = world.state.sessions.get(name)
    assert session is not None
    assert session.owner is not None
    unit = RoutingUnit(session.owner.id, 0, Incarnation(1))
    status = WorkerLoad(unit, world.now_s + 0.1, 400_000, 16, 0, 10 * GIB, 100 * GIB)
    world.state.handle(Stamped(status), world.now_s)


def settle_us(world: World) -> float:
    """Median CPU us of a first byte and an end together."""
    samples = []
    for _ in range(ROUNDS):
        events = [arrival(world, name) for name in world.draw.sample(world.names, BATCH)]
        _, dispatches = arrive_us(world, events)
        began = time.process_time_ns()
        world.finish(dispatches)
        samples.append((time.process_time_ns() - began) / len(dispatches) / 1e3)
    return median(samples)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def session_bytes(sessions: int) -> float:
    """Resident bytes for each session with a finished turn, its name included."""
    gc.collect()
    before = rss_bytes()
    world = World("ownerserve", workers=64, sessions=sessions)
    gc.collect()
    return (rss_bytes() - before) / len(world.names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    sessions = parser.parse_args().sessions
    rows = [Row("memory a session", "B", session_bytes(sessions), goal="<= 1024")]
    for workers in (4, 64, 1024):
        world = World("ownerserve", workers=workers, sessions=sessions)
        gc.collect()
        gc.freeze()
        goal = GOALS_US.get(workers, "")
        for case in ("calm", "hot", "new", "fork"):
            answer_us, all_us = decide_us(world, case)
            rows.append(Row(f"decide, {case}, {workers:,} workers", "us", answer_us, goal=goal))
            rows.append(Row(f"arrive, {case}, {workers:,} workers", "us", all_us))
        rows.append(Row(f"end, {workers:,} workers", "us", settle_us(world)))
        world.state.check()
        gc.unfreeze()
    for policy in ROUTING_POLICIES:
        for workers in (64, 1024):
            world = World(policy, workers=workers, sessions=2000)
            answer_us, _ = decide_us(world, "calm")
            rows.append(Row(f"decide, {policy}, calm, {workers:,} workers", "us", answer_us))
    report("decide_bench", rows)


if __name__ == "__main__":
    main()
