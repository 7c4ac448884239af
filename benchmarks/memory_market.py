"""Range and point state in one memory: the moving border, fixed splits and orders of eviction.

    python benchmarks/memory_market.py border --traces FOLDER [--draw 203] [--variant "2 %"]
    python benchmarks/memory_market.py orders --traces FOLDER [--draw 201]

border   8 sessions, 16 sequences at once: V4-Flash in 1.2 GB, Qwen3.5-35B-A3B in 8 GB. The border
         that moves beside fixed shares of points: cached prompt tokens of all prompt tokens (turns
         refused as too long for the device count as not cached), turns refused; of other variants
         cached shares over the turns that both served, theirs and the border's; of a border that
         moves the points' share of the arena, its means over eighths of the run
orders   24 sessions, 32 at once, 4 and 16 GB: tokens computed under each order, and the seconds
         of computing that a device without bounds spares

`--variant`: "N %" a fixed share; "least N %" a border that leaves points so much; "most N %" one
that begins there and gives them no more. `--json` is written on after each run.

Simulated: one worker, no tier below, `sticky`, closed loop, Claude-Code sessions drawn by seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ownerserve.cache.pools import budget
from ownerserve.sim.build import Built, build
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.draws import compared
from ownerserve.sim.suites.traces import find
from ownerserve.sim.workload import Sample, WorkloadDriver, WorkloadShape
from ownerserve.trace.model import Trace

BORDER = "border"
FIXED = ("3 %", "10 %", "25 %")
NO_BOUNDS = "no bounds"
ORDERS = ("lru", "fifo", "cost")
NO_BOUNDS_BYTES = 1 << 41
DRAWS = (201, 202, 203, 204, 205)
CALLS = 64
"""Events of the simulation between two looks at the border."""
PARTS = 8


class Model(NamedTuple):
    """A model has a pace, and memory for each of the two comparisons."""

    name: str
    pace: str
    border_bytes: int
    orders_bytes: int


MODELS = (
    Model("V4-Flash", "deepseek-v4-flash@h200", 1_200_000_000, 4_000_000_000),
    Model("Qwen3.5", "qwen3.5-35b-a3b@h200", 8_000_000_000, 16_000_000_000),
)


class Outcome(msgspec.Struct, frozen=True):
    """What came of one run. `turns` has (prompt, cached) tokens of those served, by session and
    position; `points` the points' share of the arena in each eighth of the run."""

    model: str
    draw: int
    variant: str
    prompt_tokens: int
    refused: float
    computed_tokens: int
    prefill_s: float
    turns: dict[str, tuple[int, int]]
    points: list[float]

    @property
    def share(self) -> float:
        """Cached prompt tokens of all prompt tokens."""
        return sum(cached for _, cached in self.turns.values()) / self.prompt_tokens

    def share_with(self, other: Outcome) -> float:
        """Return the cached share of the turns that the other served too."""
        both = [self.turns[name] for name in self.turns if name in other.turns]
        return sum(cached for _, cached in both) / sum(prompt for prompt, _ in both)


@contextmanager
def points_of(variant: str) -> Iterator[None]:
    """Have budgets share memory as the variant says while this lasts."""
    kept = budget.POINT_SHARE, budget.LEAST_SHARE
    word, _, _ = variant.rpartition(" %")
    kind, _, number = word.rpartition(" ")
    if number:
        share = float(number) / 100.0
        if kind == "least":
            budget.LEAST_SHARE = share / budget.POINT_SHARE
        else:
            budget.POINT_SHARE = share
            budget.LEAST_SHARE = budget.LEAST_SHARE if kind == "most" else 1.0
    try:
        yield
    finally:
        budget.POINT_SHARE, budget.LEAST_SHARE = kept


def setup_of(what: str, model: Model, draw: int, variant: str) -> SimSetup:
    """Return the fleet of one worker."""
    sessions, running = (8, 16) if what == BORDER else (24, 32)
    kv_bytes = model.border_bytes if what == BORDER else model.orders_bytes
    setup = SimSetup(
        policy="sticky",
        workers=1,
        pace=model.pace,
        kv_bytes=NO_BOUNDS_BYTES if variant == NO_BOUNDS else kv_bytes,
        running=running,
        shape=WorkloadShape(sessions=Sample(sessions), seed=draw),
    )
    return msgspec.structs.replace(setup, cache_policy=variant) if variant in ORDERS else setup


def points_share(built: Built) -> float:
    """Return what of the arena is point slots now."""
    cache = built.fleet.workers[0].cache
    sizes = {c.name: c.slot_bytes for c in cache.layout.components}
    held = sum(pool.capacity * sizes[pool.name] for pool in cache.occupancy.points)
    blocks = cache.occupancy.blocks.capacity * sum(sizes[n] for n in cache.layout.range_names)
    return held / (held + blocks)


def prefill_s(built: Built, cached: Any, computed: Any) -> float:
    """Return what computing prompts behind what was cached takes, without what a pass costs."""
    pace, ends = built.pace, cached + computed
    nothing_ms = pace.step_ms(0, 0.0, 0, 0)
    seen = (ends.astype(float) ** 2 - cached.astype(float) ** 2) / 2.0
    pairs = zip(computed, seen, strict=True)
    return sum(pace.step_ms(int(new), float(to), 0, 0) - nothing_ms for new, to in pairs) / 1e3


def run(what: str, model: Model, trace: Trace, draw: int, variant: str) -> Outcome:
    """Run one fleet to its end."""
    setup = setup_of(what, model, draw, variant)
    with points_of(variant):
        built = build(WorkloadDriver.of(trace, setup.shape), setup)
    stood = [points_share(built)]
    built.fleet.begin()
    while built.fleet.is_busy:
        built.heap.run_some(CALLS)
        stood.append(points_share(built))
    table = built.fleet.rows.table()
    served = table[table["reason"] == 0]
    names = [f"{row['session']}.{row['position']}" for row in served]
    pairs = zip(served["prompt_tokens"].tolist(), served["cached_tokens"].tolist(), strict=True)
    return Outcome(
        model.name,
        draw,
        variant,
        int(table["prompt_tokens"].sum()),
        1.0 - len(served) / len(table),
        int(served["computed_tokens"].sum()),
        prefill_s(built, served["cached_tokens"], served["computed_tokens"]),
        dict(zip(names, pairs, strict=True)),
        [float(part.mean()) for part in np.array_split(np.asarray(stood), PARTS)],
    )


def told(what: str, one: Outcome, base: Outcome) -> str:
    """Return a cell of the table; `base` is the run with the border, or without bounds."""
    if what != BORDER:
        return f"{one.computed_tokens / 1e6:.2f} M, {one.prefill_s - base.prefill_s:,.0f} s"
    said = f"{one.share:.3f}, {one.refused:.3f}"
    if one is not base:
        said += f", {one.share_with(base):.3f}/{base.share_with(one):.3f}"
    if not one.variant[0].isdigit():
        said += "\n" + " ".join(f"{share:.1%}" for share in one.points)
    return said


def ratios(found: dict[str, list[Outcome]]) -> str:
    """Return the default order's seconds over the others', of all draws."""
    bounds = [one.prefill_s for one in found[NO_BOUNDS]]
    spared = {
        name: [one.prefill_s - base for one, base in zip(found[name], bounds, strict=True)]
        for name in ORDERS
    }
    return ", ".join(
        f"cost / {name} {compared(spared['cost'], spared[name])}" for name in ORDERS[:2]
    )


def main() -> None:
    """Run what is wanted and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=(BORDER, "orders"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--draw", type=int, nargs="*", default=DRAWS)
    parser.add_argument("--model", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--variant", nargs="*", default=FIXED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace, _ = find("claude_code", options.traces, Scale.FULL)
    variants = (BORDER, *options.variant) if options.what == BORDER else (NO_BOUNDS, *ORDERS)
    console, kept = Console(width=180), list[Outcome]()
    for model in (model for model in MODELS if model.name in options.model):
        table, found = Table("draw", *variants, title=model.name), dict[str, list[Outcome]]()
        for draw in options.draw:
            for variant in variants:
                kept.append(run(options.what, model, trace, draw, variant))
                found.setdefault(variant, []).append(kept[-1])
                if options.json is not None:
                    options.json.write_bytes(msgspec.json.encode(kept))
            row = [found[variant][-1] for variant in variants]
            table.add_row(str(draw), *[told(options.what, one, row[0]) for one in row])
        console.print(table)
        if options.what != BORDER:
            console.print(ratios(found))


if __name__ == "__main__":
    main()
