"""One set of data a figure, small and made up: for tests of how figures are drawn and written."""

from __future__ import annotations

from ownerserve.report.figures.amplification import (
    Amplification,
    Coupled,
    CoupledPoint,
    amplification,
    coupled,
)
from ownerserve.report.figures.architecture import Architecture, architecture
from ownerserve.report.figures.grids import (
    HeatMap,
    MoveAt,
    Split,
    SplitMatrix,
    heat_map,
    split_matrix,
)
from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.figures.restore import Restored, RestorePolicies, restore_policies
from ownerserve.report.figures.reuse import ReuseShares, ReuseTopology, reuse_topology
from ownerserve.report.figures.state import (
    SessionsByMemory,
    StateBreakdown,
    sessions_by_memory,
    state_breakdown,
)
from ownerserve.report.figures.sweeps import Sweep, Sweeps, sweeps
from ownerserve.report.figures.timeline import Coupling, Timeline, TimelineSpan, coupling_timeline

POLICIES = ("round_robin", "lmetric", "lmetric_gate", "sticky", "static_pd", "ear", "ownerserve")


def lane(turn_s: float, gap_s: float, kind: str, turns: int) -> list[TimelineSpan]:
    spans, at_s = [], 0.0
    for _ in range(turns):
        spans.append(TimelineSpan("turn", at_s, at_s + turn_s))
        spans.append(TimelineSpan(kind, at_s + turn_s, at_s + turn_s + gap_s))
        at_s += turn_s + gap_s
    return spans[:-1]


def bars(title: str, unit: str, better: str = "lower", reference: float | None = None) -> Panel:
    values: dict[str, float | None] = {name: 9.5 - i for i, name in enumerate(POLICIES)}
    values["static_pd"] = None
    return Panel(title, unit, values, better, reference, "bound" if reference else "")


def heat() -> HeatMap:
    rows = [[float((t * 37 + w * 911) % 5_000 * (w + 1)) for t in range(120)] for w in range(8)]
    moves = [MoveAt(20.0, 7, 1), MoveAt(70.5, 6, 0), MoveAt(90.0, 2, 5)]
    return HeatMap("Pending prefill", [float(t) for t in range(120)], rows, moves)


def splits() -> SplitMatrix:
    cells = [
        Split(p, d, None if d == 1 and p > 5 else 10.0 * min(p, d) + p, "")
        for p in range(1, 8)
        for d in range(1, 9 - p)
    ]
    hybrid = {n: 7.0 * n for n in range(2, 9)}
    return SplitMatrix("Static PD beside hybrid", "tasks per GPU-hour", "higher", cells, hybrid)


EXAMPLES = {
    "state_breakdown": (
        state_breakdown,
        StateBreakdown(
            131_072,
            {
                "DeepSeek-V4-Pro": {"compressed": 5 << 27, "window": 1 << 25, "indexer": 1 << 26},
                "Qwen3-30B-A3B": {"full attention": 12 << 30},
                "Qwen3-Next-80B": {"full attention": 3 << 30, "recurrent": 1 << 26},
            },
            {"DeepSeek-V4-Pro": 13 << 30, "Qwen3-Next-80B": 12 << 30},
        ),
    ),
    "sessions_by_memory": (
        sessions_by_memory,
        SessionsByMemory(
            131_072,
            [(8 << 30) << i for i in range(6)],
            {"dense": [0.7 * 2**i for i in range(6)], "ours": [9 * 2.0**i for i in range(6)]},
        ),
    ),
    "restore_policies": (
        restore_policies,
        RestorePolicies(
            "Restores under each way of keeping SWA state",
            {
                "full": Restored(3, 120, 0, 4e10, 1.8),
                "zero": Restored(1, 20, 240, 2e9, 1.02),
                "periodic p=8": Restored(1, 30, 80, 8e9, 1.1),
                "adaptive": Restored(1, 32, 40, 6e9, None),
            },
        ),
    ),
    "s001_rows": (
        panels,
        Panels(
            "Seed 001 §5.3: eviction of whole sessions and of blocks",
            [
                Panel("evictions", "count", {"by session": 90, "by block": 8.0}, reference=10,
                      reference_is="seed's goal"),
                Panel("one eviction", "tokens", {"by session": 67_000, "by block": 420}),
                Panel("TTFT p99", "s", {"by session": 1.28, "by block": 0.6}),
                Panel("direct append", "% of turns", {"by session": 58, "by block": 88},
                      better="higher"),
            ],
            columns=2,
        ),
    ),
    "f01_amplification": (
        amplification,
        Amplification("Wall clock over trace time", {n: 8.0 / (i + 1) for i, n in
                                                     enumerate(POLICIES)}),
    ),
    "f02_reuse": (
        reuse_topology,
        ReuseTopology(
            {"seed 002": ReuseShares(0.932, 0.057, 0.011),
             "Claude Code": ReuseShares(0.9, 0.0, 0.1)},
            {"Claude Code": [int(1e6 / (i + 20)) for i in range(570)],
             "Mooncake": [int(1e6 / (i + 1)) for i in range(3_000)]},
        ),
    ),
    "f03_coupling": (
        coupling_timeline,
        Coupling(
            [
                Timeline("Chat: a person between turns", {
                    "turn 2 s": lane(2, 12, "human", 4), "turn 3 s": lane(3, 12, "human", 4)}),
                Timeline("Agent: the next turn starts at once", {
                    "turn 2 s": lane(2, 0.3, "tool", 20), "turn 3 s": lane(3, 0.3, "tool", 18)}),
            ]
        ),
    ),
    "f05_architecture": (
        architecture,
        Architecture(
            ["worker 0", "worker 1", "worker 2", "worker N"],
            {"s12": "worker 0", "s12/a1": "worker 0", "s31": "worker 2"},
            ("worker 0", "worker 2", "s12"),
        ),
    ),
    "f06_end_to_end": (
        panels,
        Panels("End to end", [
            bars("TTFT p50", "s"), bars("TPOT p90", "s"),
            bars("Cached-token share", "%", "higher", 9), bars("Wall-clock", "", reference=1)]),
    ),
    "f08_law": (
        coupled,
        Coupled(
            "The law and the runs",
            [CoupledPoint(n, 9.0 - i, 0.1 * (i + 1), 1.1 / (1 - 0.1 * (i + 1)))
             for i, n in enumerate(POLICIES)],
        ),
    ),
    "f09_sensitivity": (
        sweeps,
        Sweeps("Sensitivity", [
            Sweep(f"setting {k}", "value", "step p95, s", [1, 2, 4, 8, 16],
                  {n: [1.0 + i + k, 2.0 + i, 3.0, None, 5.0 * i] for i, n in
                   enumerate(("sticky", "lmetric_gate", "ownerserve"))}, "log", 4)
            for k in range(3)]),
    ),
    "f10_heat": (heat_map, heat()),
    "pd_splits": (split_matrix, splits()),
    "capacity_cliff": (
        sweeps,
        Sweeps("Capacity cliff", [
            Sweep("2P6D", "sessions", "% of turns", [8, 16, 24, 32, 48, 64],
                  {"direct append": [95, 94, 90, 61, 44, 41], "fallback": [5, 6, 9, 35, 46, 51],
                   "errors": [0, 0, 0, 3, 9, 8]})], columns=1),
    ),
}  # fmt: skip
