"""What a node costs the engine's thread: a cold arrival's ids, pressure, a turn's end.

    python benchmarks/node_costs.py [--json PATH]

Medians of CPU time. Run with PYTHONPATH at another tree's src for its numbers; what a tree does not
have is left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Turn
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Identity, Numerics, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.state import NodeState
from ownerserve.node.vocabulary.events import TurnArrived, TurnEnded, TurnGone
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState
from ownerserve.plan.restore import Planner

B = 128
LAYOUT = Layout(
    B,
    (
        Component("csa_main", Coverage.RANGE, 4096, 4096),
        Component("csa_index", Coverage.RANGE, 1024, 1024),
        Component("swa", Coverage.POINT, 8192, 8192),
        Component("overlap", Coverage.POINT, 1024, 1024),
    ),
    state_bytes=64,
)
MODEL = ModelState(
    layers=4, block_tokens=B, range_bytes_per_token=40.0, point_bytes=9216, exact_replay_tokens=500
)
IDENTITY = Identity(
    model_id="toy",
    weights="w",
    tokenizer="t",
    spec_digest=bytes(32),
    numerics=Numerics("float32"),
    tenant_salt=bytes(32),
)


def node(*, blocks: int, points: int) -> NodeState:
    count = {Coverage.RANGE: blocks, Coverage.POINT: points}
    slots = {c.name: count[c.coverage] for c in LAYOUT.components}
    names = RecordNames(IDENTITY, LAYOUT, engine="toy/1", blocks=8)
    planner, costs = Planner(MODEL, FULL_ABILITIES), CostModel(UNMEASURED)
    cache = HeteroCache(LAYOUT, slots, 8)
    return NodeState(cache, names, planner=planner, costs=costs, settings=NodeSettings())


def median_us(run: Callable[[], None], *, prepare: Callable[[], None], times: int) -> float:
    taken = []
    for _ in range(times):
        prepare()
        started_ns = time.process_time_ns()
        run()
        taken.append((time.process_time_ns() - started_ns) / 1e3)
    return statistics.median(taken)


def arrival(blocks: int, *, digests_known: bool) -> float:
    """A prompt that is nowhere: from `TurnArrived` to its `FindRecords`."""
    state = node(blocks=64, points=16)
    tokens = pack(range(blocks * B + 1))
    turn, session = TurnId("t"), SessionId("s") if digests_known else None
    if digests_known:
        state.chains.digests(tokens, session)

    def arrive() -> None:
        state.handle(TurnArrived(turn, session, tokens), 0.0)

    arrive()
    return median_us(arrive, prepare=lambda: state.handle(TurnGone(turn), 0.0) and None, times=15)


def finish_one(state: NodeState, tokens: bytes, number: int, now: float) -> None:
    cache, turn = state.cache, TurnId(f"t{number}")
    cache.begin(Turn(turn, SessionId(f"s{number}"), tokens), now)
    count = len(tokens) // 4
    cache.reserve(turn, count, now)
    cache.advance(turn, tokens[: count // B * B * 4], now)
    cache.snapshot(turn, now)
    cache.finish(turn, now)


def pressure(points: int) -> dict[str, float]:
    """A full point pool of `points` sessions: one run to 5 % free."""
    state = node(blocks=4 * points, points=points)
    for number in range(points):
        finish_one(state, pack(range(number * 1000, number * 1000 + 2 * B)), number, 0.0)
    cache = state.cache
    cache.pressure.watermarks = Watermarks(tier="store", idle_s=1.0)
    rows = {}
    if hasattr(cache.pressure, "is_due"):
        calm = HeteroCache(LAYOUT, {c.name: 64 for c in LAYOUT.components}, 8)
        loops = 1000

        def ask() -> None:
            for _ in range(loops):
                assert not calm.pressure.is_due

        rows["nothing short: is_due"] = median_us(ask, prepare=lambda: None, times=9) / loops
    spill = []

    def relieve() -> None:
        spill[:] = cache.pressure.relieve(100.0)

    rows[f"spill run, {points} points"] = median_us(relieve, prepare=lambda: None, times=1)
    ticket = next(directive.ticket for directive in spill if hasattr(directive, "ticket"))
    cache.pressure.spilled(ticket)
    rows[f"next run, {points} points"] = median_us(relieve, prepare=lambda: None, times=1)
    return rows


def turn_end(gaps: int) -> float:
    """`TurnEnded` of a session with so many known gaps."""
    state = node(blocks=4096, points=64)
    tokens = pack(range(800 * B))
    finish_one(state, tokens, 0, 0.0)
    session, turn = SessionId("s0"), TurnId("t")
    now = [0.0]

    def ended() -> None:
        state.handle(TurnEnded(turn, 700 * B, 800 * B, 800 * B), now[0])

    def prepare() -> None:
        now[0] += 3.0
        state.handle(TurnArrived(turn, session, tokens), now[0])

    for _ in range(gaps):
        prepare()
        ended()
    return median_us(ended, prepare=prepare, times=25)


def plan(*, free: int) -> float:
    """How a branch of 800 blocks begins, 2,000 idle sessions beside it; `free` blocks are free."""
    state = node(blocks=4800 + free, points=4096)
    tokens = pack(range(800 * B))
    finish_one(state, tokens, 0, 0.0)
    for number in range(1, 2001):
        finish_one(state, pack(range(number * 1000, number * 1000 + 2 * B)), number, float(number))
    assert state.cache.occupancy.blocks.free == free
    prompt = tokens[: 700 * B * 4] + pack(range(100 * B))

    def resume() -> None:
        assert state.resume(prompt) is not None

    return median_us(resume, prepare=lambda: None, times=101)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows there")
    target = parser.parse_args().json
    rows = {
        "cold arrival, 1,024 blocks x 4 components": arrival(1024, digests_known=False),
        "the same, prefix hashed before": arrival(1024, digests_known=True),
        "turn end, gaps unknown": turn_end(0),
        "turn end, 8 gaps known": turn_end(8),
        "plan of a branch, room for it": plan(free=200),
        "plan of a branch, others go for it": plan(free=0),
    }
    for points in (1000, 20_000):
        rows |= pressure(points)
    for name, us in rows.items():
        print(f"{name:<44} {us:>10.1f} us")
    if target is not None:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        target.write_text(json.dumps({"machine": machine, "cpu_us": rows}, indent=1))


if __name__ == "__main__":
    main()
