"""Seed 001's table: what an eviction takes, and what a session's next turn still finds.

    python benchmarks/cache_eviction.py [--sessions N] [--trace PATH] [--only WORKLOAD]

Replays agent sessions, closed loop, against caches of equal size: slots pinned between turns,
SGLang's RadixCache with LRU and with session references, and ours. SGLang's tree is its own code,
in .venv-sglang; the replay is the same for all (benchmarks/cache/replay.py). The workloads are a
generated one and, where they are at hand, the shared Claude-Code sessions, all of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from cache.remote import ROOT, Measurer, installed
from cache.workload import write
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from result import Row, larger_is_better, report, smaller_is_better

BLOCK = 64
CAPACITY_TOKENS = 1_000_000
LANES = 32
"""About 100,000 tokens a session: the agents want three times what there is."""

POINTS = 30
"""Of DeepSeek-V4-Pro, 147 MiB beside 5.1 GiB of compressed KV: about one for each agent."""
SHARED = ROOT.parent / "shared" / "traces" / "claude-code-weka" / "sessions.jsonl.zst"


class Workload(NamedTuple):
    """`goodbye`: whether the cache is told when an agent ends. `points`: slots for point state;
    0 is a model with none, the only kind that RadixCache and the seed know."""

    name: str
    trace: Trace
    goodbye: str = "never"
    points: int = 0


class System(NamedTuple):
    """One column of the seed's table."""

    name: str
    where: str
    policy: str


OURS = System("ours", "ours", "cost")
OTHERS = (
    System("pinned slots", "ours", "pinned-slot"),
    System("SGLang RadixCache, LRU", "sglang", "lru"),
    System("SGLang RadixCache, session reference", "sglang", "session-reference"),
    System("ours with LRU", "ours", "lru"),
    System("ours with session reference", "ours", "session-reference"),
)


def workloads(sessions: int, trace: Path) -> Iterator[Workload]:
    """`sessions` generated ones, and all recorded ones."""
    options = Options(sessions=sessions, seed=1, block_tokens=BLOCK)
    made = generate("coding-agent", options)
    yield Workload("generated", made)
    yield Workload("generated_goodbye", made, goodbye="told")
    yield Workload("generated_hybrid", made, points=POINTS)
    if trace.exists():
        recorded = read_trace(trace)
        yield Workload("claude_code", recorded)
        yield Workload("claude_code_hybrid", recorded, points=POINTS)


def rows(workload: str, found: dict[str, dict[str, float]]) -> list[Row]:
    """Ours beside each other system, in the units of the seed."""
    table = []
    ours = per_metric(found[OURS.name])
    for other in OTHERS:
        if other.name not in found:
            continue
        theirs = per_metric(found[other.name])
        for metric, unit, better, goal in (
            ("freed_beyond_need_per_eviction", "tokens", smaller_is_better, "< 64"),
            ("freed_at_once", "tokens", smaller_is_better, ""),
            ("evictions", "count", smaller_is_better, ""),
            ("next_turn_cached_share", "of known", larger_is_better, ""),
            ("next_turn_cached", "tokens", larger_is_better, ""),
            ("reprefilled", "M tokens", smaller_is_better, ""),
            ("sessions_resident", "mean", larger_is_better, ""),
        ):
            row = better(
                f"{workload}.{metric}",
                unit,
                ours[metric],
                other=theirs[metric],
                other_name=other.name,
                goal=goal,
            )
            table.append(row)
    return table


def per_metric(run: dict[str, float]) -> dict[str, float]:
    """Blocks to what the table states."""
    beyond = run["freed"] - run["wanted"]
    at_once = run["freed"] / max(run["evictions"], 1)
    if run.get("drops"):
        at_once = run["dropped"] / run["drops"]
    return {
        "freed_beyond_need_per_eviction": beyond * BLOCK / max(run["evictions"], 1),
        "freed_at_once": at_once * BLOCK,
        "evictions": run["evictions"],
        "next_turn_cached_share": run["next_cached"] / max(run["next_known"], 1),
        "next_turn_cached": run["next_cached"] * BLOCK / max(run["next_turns"], 1),
        "reprefilled": (run["next_known"] - run["next_cached"]) * BLOCK / 1e6,
        "sessions_resident": run["resident"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=30, help="generated ones (default 30)")
    parser.add_argument("--trace", type=Path, default=SHARED, help="recorded sessions")
    parser.add_argument(
        "--only", metavar="WORKLOAD", help="one of them; its results stay apart, under its name"
    )
    arguments = parser.parse_args()
    table: list[Row] = []
    capacity = CAPACITY_TOKENS // BLOCK
    with (
        tempfile.TemporaryDirectory() as folder,
        Measurer("cache.hold_ours", ".venv") as ours,
        Measurer("cache.hold_sglang", ".venv-sglang") as sglang,
        Progress(transient=True) as progress,
    ):
        where = {"ours": ours, "sglang": sglang}
        for workload in workloads(arguments.sessions, arguments.trace):
            if arguments.only not in (None, workload.name):
                continue
            path = Path(folder) / "workload.json"
            kept = write(workload.trace, path, longest_blocks=capacity // 2)
            systems = [s for s in (OURS, *OTHERS) if not workload.points or s.where == "ours"]
            task = progress.add_task(f"{workload.name}: {kept} sessions", total=len(systems))
            found = {}
            for system in systems:
                found[system.name] = where[system.where].ask(
                    "replay",
                    path=str(path),
                    policy=system.policy,
                    capacity=capacity,
                    lanes=LANES,
                    goodbye=workload.goodbye,
                    points=workload.points,
                )
                progress.advance(task)
                progress.log(f"{workload.name}, {system.name}: {found[system.name]}")
            table += rows(workload.name, found)
    name = "cache_eviction" if arguments.only is None else f"cache_eviction_{arguments.only}"
    report(name, table, others=installed(".venv-sglang", "sglang"))


if __name__ == "__main__":
    main()
