"""This experiment sets eviction by block against a session's slot as a whole, on one worker (seed
001 §5.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.suites.base import (
    Cell,
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Results,
    ResultTable,
    Scale,
    Simulation,
    known,
)
from ownerserve.sim.suites.judging import first_of
from ownerserve.sim.suites.slots import SlotNode, SlotOrder
from ownerserve.sim.workload import Capped, Sample, WorkloadShape
from ownerserve.trace.model import Trace

BLOCKS = ("cost", "session-reference", "lru")
SLOT, PINNED = "session slot", "pinned-slot"
ORDERS = (SLOT, *BLOCKS, PINNED)
ENDLESS = "no eviction"
ENDLESS_BYTES = 1 << 40

LOADS = {
    "light": ("swe_long", "qwen3-30b-a3b@h100", 2, 10),
    "heavy": ("swe_long", "qwen3-30b-a3b@h100", 4, 12),
    "recorded": ("claude_code", "qwen3-30b-a3b@h200", 8, 24),
}
"""Load -> role, pace, sessions at once, sessions: about 1.3, 2.5 and 1.6 times what fits."""


def _setup(load: str, scale: Scale, **changes: Any) -> SimSetup:
    _, pace, lanes, sessions = LOADS[load]
    shape = WorkloadShape(mode=Capped(scale.of(lanes, 4)), sessions=Sample(scale.of(sessions, 6)))
    return SimSetup(policy="sticky", workers=1, pace=pace, shape=shape, **changes)


def measured(result: Result) -> dict[str, Any]:
    modes = result.metrics["modes"]
    assert isinstance(modes, dict)
    direct = modes.get("direct_append")
    assert isinstance(direct, dict | None)
    return {**result.metrics, "direct_share": direct["share"] if direct is not None else 0.0}


def _slot(setup: SimSetup, trace: Trace | None) -> dict[str, Any]:
    assert trace is not None
    return measured(simulate(trace, setup, parts=BaselineParts(order=SlotOrder, node=SlotNode)))


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for load, (role, *_) in LOADS.items():
        jobs[f"{load} {SLOT}"] = Measurement(partial(_slot, _setup(load, scale)), role)
        for order in (*BLOCKS, PINNED):
            setup = _setup(load, scale, cache_policy=order)
            jobs[f"{load} {order}"] = Simulation(role, setup, measured)
        endless = _setup(load, scale, kv_bytes=ENDLESS_BYTES)
        jobs[f"{load} {ENDLESS}"] = Simulation(role, endless, measured)
    return jobs


class _Row:
    """The row has seed 001's numbers of one order on one trace."""

    def __init__(self, results: Results, load: str, order: str) -> None:
        metrics = results[f"{load} {order}"]
        pressure = metrics["pressure"]
        runs, tokens = pressure["evictions"], pressure["evicted_tokens"]
        self.evictions = float(runs)
        self.tokens_each = tokens / runs if runs else None
        self.beyond = float(tokens - pressure["wanted_tokens"])
        self.ttft_p99_ms = known(metrics, "ttft_ms.p99")
        self.direct_share = float(metrics["direct_share"])
        self.error_rate = known(metrics, "error_rate")
        least = known(results[f"{load} {ENDLESS}"], "computed_tokens")
        self.again = known(metrics, "computed_tokens") - least

    def cells(self) -> list[Cell]:
        if self.error_rate > 0.5:  # nearly all were turned away: the rest of the row says nothing
            return [self.evictions, *[None] * 4, self.direct_share, self.error_rate]
        return [
            self.evictions, self.tokens_each, self.beyond, self.ttft_p99_ms, self.again,
            self.direct_share, self.error_rate,
        ]  # fmt: skip


COLUMNS = (
    "eviction runs",
    "tokens a run",
    "tokens beyond need",
    "TTFT p99 (ms)",
    "tokens computed again",
    "direct_append share",
    "error rate",
)


def _tables(results: Results) -> list[ResultTable]:
    found = []
    for load in LOADS:
        rows: list[list[Cell]] = [[o, *_Row(results, load, o).cells()] for o in ORDERS]
        caption = (
            f"Seed 001 §5.3's rows, {_told(results, load)}. Computed again: more than with a "
            "device that never evicts."
        )
        found.append(ResultTable(f"001-eviction-{load}", caption, ["order", *COLUMNS], rows))
    return found


def _figures(results: Results) -> list[Drawing]:
    drawn = []
    for load in LOADS:
        shown = (SLOT, *BLOCKS)
        rows = {order: _Row(results, load, order) for order in shown}
        data = Panels(
            f"Eviction on one worker: {_told(results, load)}",
            [
                Panel("Tokens an eviction", "tokens", {o: rows[o].tokens_each for o in shown}),
                Panel("Computed again", "tokens", {o: rows[o].again for o in shown}),
                Panel("First token, p99", "ms", {o: rows[o].ttft_p99_ms for o in shown}),
                Panel(
                    "Direct append", "of turns", {o: rows[o].direct_share for o in shown},
                    better="higher",
                ),
            ],
            columns=2,
        )  # fmt: skip
        drawn.append(Drawing(f"001-eviction-{load}", panels, data, "Seed 001 §5.3's rows."))
    return drawn


def _verdicts(results: Results) -> list[Finding]:
    """Return one finding a claim, over all loads: it holds, or does not, where it does on each.

    A load under which nothing was ever evicted or refused shows nothing.
    """
    by_claim: dict[str, list[Finding]] = {}
    for load in LOADS:
        rows = {order: _Row(results, load, order) for order in ORDERS}
        is_full = rows[SLOT].evictions > 0 or rows[PINNED].error_rate > 0
        for one in (*_granularity(rows), *_effects(rows)):
            number = f"{_told(results, load)}: {one.number}"
            verdict = one.verdict if is_full else Verdict.NOT_SHOWN
            told = msgspec.structs.replace(one, number=number, verdict=verdict)
            by_claim.setdefault(one.claim, []).append(told)
    return [_joined(findings) for findings in by_claim.values()]


def _joined(findings: list[Finding]) -> Finding:
    verdicts = {one.verdict for one in findings}
    return msgspec.structs.replace(
        findings[0],
        verdict=verdicts.pop() if len(verdicts) == 1 else Verdict.IN_RANGE,
        number=". ".join(one.number for one in findings),
    )


def _told(results: Results, load: str) -> str:
    role, _, lanes, _ = LOADS[load]
    return f"{results.origins[role]}, {results.scale.of(lanes, 4)} sessions at once"


def _granularity(rows: dict[str, _Row]) -> list[Finding]:
    slot, block = rows[SLOT], rows[BLOCKS[0]]
    each, block_each = slot.tokens_each or 0.0, block.tokens_each or 0.0
    finer = first_of(block_each < 500, block_each < each / 5)
    return [
        Finding(
            "Eviction by block frees what is needed: below 500 tokens at a time, not 67k",
            "seed 001 §5.3",
            finer if block.evictions and slot.evictions else Verdict.NOT_SHOWN,
            f"tokens an eviction run: {block_each:,.0f} by block ({BLOCKS[0]}), {each:,.0f} by "
            f"session; beyond need {block.beyond:,.0f} and {slot.beyond:,.0f}",
        ),
        Finding(
            "Eviction runs fall to a ninth",
            "seed 001 §5.3",
            first_of(block.evictions < slot.evictions / 9, block.evictions < slot.evictions),
            f"{slot.evictions:,.0f} runs by session, {block.evictions:,.0f} by block",
        ),
    ]


def _effects(rows: dict[str, _Row]) -> list[Finding]:
    slot, pinned = rows[SLOT], rows[PINNED]
    best = min(BLOCKS, key=lambda order: rows[order].again)
    block = rows[best]
    return [
        Finding(
            "Eviction by block computes an order of magnitude fewer tokens again",
            "seed 001 TL;DR",
            first_of(block.again < slot.again / 8, block.again < 0.95 * slot.again),
            f"tokens computed again: {block.again:,.0f} ({best}) against {slot.again:,.0f}; "
            + ", ".join(f"{order} {rows[order].again:,.0f}" for order in BLOCKS),
        ),
        Finding(
            "TTFT p99 falls from 1.28 s to below 0.7 s",
            "seed 001 §5.3",
            first_of(
                block.ttft_p99_ms < 0.55 * slot.ttft_p99_ms, block.ttft_p99_ms < slot.ttft_p99_ms
            ),
            f"{slot.ttft_p99_ms:,.0f} ms by session, {block.ttft_p99_ms:,.0f} ms by block ({best})",
        ),
        Finding(
            "At least 85 % of the turns append directly",
            "seed 001 §5.3",
            first_of(block.direct_share >= 0.85, block.direct_share > slot.direct_share),
            f"{100 * block.direct_share:.3g} % by block ({best}), "
            f"{100 * slot.direct_share:.3g} % by session",
        ),
        Finding(
            "Pinned idle sessions refuse turns for ever once they fill the pool",
            "seed 001 §1",
            first_of(
                pinned.error_rate > 0.5 > 10 * block.error_rate,
                pinned.error_rate > block.error_rate,
            ),
            f"{100 * pinned.error_rate:.3g} % of turns failed with pinned slots, "
            f"{100 * block.error_rate:.3g} % by block",
        ),
    ]


EXPERIMENTS = [
    Experiment(
        name="001-eviction",
        title="Eviction by block, by session, and pinned",
        source="seed 001 §5.3",
        about="One worker with more sessions at once than its device holds. Session slot: idle "
        "sessions are locked and released whole, least recent first (what seed 001 replaces). "
        "Pinned: never released. The others trim a tail block by block in the order named; a run "
        "takes what a prefill chunk of up to 8,192 tokens lacks, or up to the worker's watermark "
        "(5 % free once less than 2 % is), so runs are more and larger than the seed's pages. "
        "Computed again is against a device that holds everything.",
        jobs=_jobs,
        verdicts=_verdicts,
        figures=_figures,
        tables=_tables,
    ),
]
