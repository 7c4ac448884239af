"""Small fleets on small hand-made traces: agents that share a head, grow and fork."""

from __future__ import annotations

from random import Random
from typing import Any

from ownerserve.sim.build import Built, build
from ownerserve.sim.config.setup import PD, SimSetup
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.workload import Capped, WorkloadDriver, WorkloadShape
from ownerserve.trace.model import Agent, Trace, TraceRequest, TraceSession

U = 64
MIB = 1 << 20
BACK, BACK_UNITS = 8, 625


def agents(sessions: int = 8, turns: int = 6, *, seed: int = 0, most_output: int = 40) -> Trace:
    """Sessions whose prompts grow by about 1,000 tokens a turn behind one of two heads of 1,024;
    each second one forks a sub-agent. Tools take seconds."""
    random = Random(seed)
    fresh = iter(range(10_000, 10_000_000, 1000))
    made = []
    for number in range(sessions):
        head = (1 + 100 * (number % 2), 1024 // U)
        runs = [head]
        requests: list[TraceRequest] = []
        tokens = 1024
        for position in range(turns):
            grown = random.randrange(400, 1600)
            tokens += grown
            full = tokens // U
            have = sum(count for _, count in runs)
            if full > have:
                runs.append((next(fresh), full - have))
            request = TraceRequest(
                float(position),
                tokens,
                random.randrange(1, most_output),
                runs=tuple(runs),
                after=() if not position else (position - 1,),
                think_s=random.choice((0.5, 2.0, 9.0)) if position else None,
            )
            requests.append(request)
        named = (Agent("main"),)
        if number % 2:
            named = (Agent("main"), Agent("explore"))
            first = requests[-1]
            fork = TraceRequest(
                first.start_s, 1500, 20, runs=(head, (next(fresh), 1500 // U - 16)), agent=1,
                after=(0,), think_s=1.0,
            )  # fmt: skip
            requests.append(fork)
        made.append(TraceSession(f"s{number}", tuple(requests), agents=named))
    return Trace("agents", "hand", U, "trace", "recorded", "unknown", tuple(made))


def all_back_at_once() -> Trace:
    """Sessions of 40,000 tokens that come one after the other and all go on at 100 s."""
    made = []
    for number in range(BACK):
        head, at_s = (10_000 * (number + 1), BACK_UNITS), 4.0 * number
        runs = (head, (head[0] + 5000, 10))
        first = TraceRequest(at_s, BACK_UNITS * U, 8, runs=(head,))
        second = TraceRequest(100.0, (BACK_UNITS + 10) * U, 8, runs=runs, after=(0,))
        made.append(TraceSession(f"s{number}", (first, second)))
    return Trace("back", "hand", U, "trace", "recorded", "unknown", tuple(made))


def setup(policy: str = "ownerserve", **changes: Any) -> SimSetup:
    """Four workers with room for about 21,000 tokens each; six sessions at once."""
    told: dict[str, Any] = {
        "policy": policy,
        "workers": 4,
        "prefill_workers": 2 if policy in PD else 0,
        "kv_bytes": 2048 * MIB,
        "running": 8,
        "shape": WorkloadShape(mode=Capped(6)),
    }
    return SimSetup(**{**told, **changes})


def ready(trace: Trace, wanted: SimSetup) -> Built:
    return build(WorkloadDriver.of(trace, wanted.shape), wanted)


def run(built: Built, *, check_every: int = 0, until_s: float = 3600.0) -> SimFleet:
    """To its end, with all checks; raises when it does not end in simulated time."""
    fleet, heap = built.fleet, built.heap
    fleet.begin()
    while fleet.is_busy:
        before = heap.events
        heap.run_some(check_every or 1000)
        assert heap.now < until_s and heap.events > before, "it never ends"
        if check_every:
            fleet.check()
    fleet.check()
    assert fleet.counters.turns_released == len(fleet.rows)
    assert fleet.live == 0
    return fleet
