"""These experiments run seed 003's settings v2 to v5 as policies, and the cliff of device memory
behind them.

What is not simulated: v2's aborts (two counters that name different workers for one request: here
one decision carries one worker) and what truncates about 1 % of answers in every setting.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ownerserve.kv.messages import ExecutionMode
from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.figures.sweeps import Sweep, Sweeps, sweeps
from ownerserve.router.settings import Settings
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.setup import Links, SimSetup
from ownerserve.sim.metrics.rows import MODES, NO_WORKER, SERVED
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Results,
    ResultTable,
    Scale,
    Simulation,
    at,
    by_label,
    known,
    table_of,
)
from ownerserve.sim.suites.judging import all_of, counted
from ownerserve.sim.suites.slots import Backup, SlotNode, SlotOrder, SlotRouter, pd_transfers
from ownerserve.sim.workload import Capped, Closed, First, WorkloadShape
from ownerserve.trace.model import Trace

ROLE = "swe_long"
PACE = "qwen3-30b-a3b@h100"
GPUS = 8
TCP_GB_S = 1.7
"""Mooncake over loopback TCP, as measured: 1.4 to 2.0 GB/s (research/stores-transfer.md §2.1). Here
each worker has a link of its own; on one machine they share its memory."""
TIMEOUT_S = 32.0
NEVER, ALWAYS = 0.05, 0.95
"""A session with at most, at least this share of its later turns on the fast path."""
ALL, LANES = 52, 14
"""Sessions, and how many are open at once where a table compares settings: at 14 the 8 colocated
workers answer as seed 003's do (first tokens within 0.1 s); its trace does not tell its overlap."""
SESSIONS = (8, 16, 24, 40)
"""The cliff: so many begin together."""
IN_FLIGHT = (1, 2, 4, 8)
CAPS = (2, 4, 8, 16)
Pair: TypeAlias = tuple[float, float]
FAST = MODES.index(ExecutionMode.DIRECT_APPEND)

DP = "8 colocated, KV-aware"
OURS = "8 colocated, ownerserve"
SPLITS = (1, 2)
VERSIONS = ("v2", "v3", "v4", "v5")


def _setup(policy: str, scale: Scale, *, prefill: int = 0, sessions: int = ALL) -> SimSetup:
    """Return the setup of a policy: `sessions` fewer than all begin together; all of them take
    turns on LANES."""
    mode = Closed() if sessions < ALL else Capped(scale.of(LANES, 6))
    return SimSetup(
        policy=policy,
        workers=scale.of(GPUS, 4),
        prefill_workers=prefill,
        pace=PACE,
        links=Links(nic_gb_s=TCP_GB_S),
        transfer_s=TIMEOUT_S,
        shape=WorkloadShape(mode=mode, sessions=First(scale.of(sessions, 8))),
    )


def measured(result: Result) -> dict[str, Any]:
    """Return the metrics, and how the fast path is spread over sessions."""
    table = result.rows.table()
    later = table[table["position"] > 0]
    fast = (later["mode"] == FAST) & (later["prefill_worker"] == NO_WORKER)
    shares = np.array(
        [float(fast[later["session"] == one].mean()) for one in np.unique(later["session"])]
    )
    served = later[np.isin(later["mode"], SERVED)]
    is_fast = (served["mode"] == FAST) & (served["prefill_worker"] == NO_WORKER)
    ttft_ms = (served["first_token_s"] - served["arrived_s"]) * 1e3
    return {
        **result.metrics,
        "fast_share": float(fast.mean()) if len(fast) else None,
        "starved_sessions": float((shares <= NEVER).mean()) if len(shares) else None,
        "lucky_sessions": float((shares >= ALWAYS).mean()) if len(shares) else None,
        "fast_ttft_p50_ms": float(np.median(ttft_ms[is_fast])) if is_fast.any() else None,
        "slow_ttft_p50_ms": float(np.median(ttft_ms[~is_fast])) if (~is_fast).any() else None,
    }


def _slots(
    setup: SimSetup, slots: int | None, backup: Backup, in_flight: int, trace: Trace | None
) -> dict[str, Any]:
    """Run a fleet whose sessions are slots on D workers."""
    assert trace is not None

    def router(settings: Settings) -> SlotRouter:
        return SlotRouter(slots)

    parts = BaselineParts(
        policy=router,
        order=SlotOrder,
        node=SlotNode,
        transfers=pd_transfers(in_flight, backup),
    )
    return measured(simulate(trace, setup, parts=parts))


def _slotted(
    scale: Scale,
    prefill: int,
    *,
    slots: int | None,
    backup: Backup = "keep",
    in_flight: int = 0,
    sessions: int = ALL,
) -> Measurement:
    setup = _setup("static_pd_delta", scale, prefill=prefill, sessions=sessions)
    return Measurement(partial(_slots, setup, slots, backup, in_flight), ROLE)


def _fleet(scale: Scale, policy: str, prefill: int = 0, sessions: int = ALL) -> Simulation:
    setup = _setup(policy, scale, prefill=prefill, sessions=sessions)
    return Simulation(ROLE, setup, measured)


def _name(version: str, prefill: int) -> str:
    return f"{version}, {prefill}P{GPUS - prefill}D"


def _version_jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {DP: _fleet(scale, "kv_aware"), OURS: _fleet(scale, "ownerserve")}
    for prefill in SPLITS:
        jobs[_name("v2", prefill)] = _fleet(scale, "round_robin_pd", prefill)
        jobs[_name("v3", prefill)] = _slotted(scale, prefill, slots=4)
        jobs[_name("v4", prefill)] = _slotted(scale, prefill, slots=16)
        jobs[_name("v5", prefill)] = _slotted(
            scale, prefill, slots=None, backup="release-after-transfer"
        )
    return jobs


COLUMNS = {
    "errors": "error_rate",
    "fast path": "fast_share",
    "sessions never on it": "starved_sessions",
    "sessions always on it": "lucky_sessions",
    "turn p50 (ms)": "step_latency_ms.p50",
    "turn p90 (ms)": "step_latency_ms.p90",
    "turn p99 (ms)": "step_latency_ms.p99",
    "TTFT p50 (ms)": "ttft_ms.p50",
    "TTFT p90 (ms)": "ttft_ms.p90",
    "fast TTFT p50 (ms)": "fast_ttft_p50_ms",
    "other TTFT p50 (ms)": "slow_ttft_p50_ms",
    "cached share": "cached_token_share",
    "network KV (bytes)": "network_kv_bytes",
}


def _labels(*versions: str) -> list[str]:
    return [_name(version, prefill) for version in versions for prefill in SPLITS]


def _version_tables(results: Results) -> list[ResultTable]:
    labels = [DP, OURS, *_labels(*VERSIONS)]
    caption = "Seed 003's settings on equal GPUs. Fast path: appended where the session's state is."
    return [table_of(results, labels, COLUMNS, name="003-versions", caption=caption)]


def _version_figures(results: Results) -> list[Drawing]:
    labels = [DP, OURS, *_labels(*VERSIONS)]
    shown = [
        Panel("On the fast path", "of later turns", by_label(results, labels, "fast_share"),
              better="higher"),
        Panel("Never on it", "of sessions", by_label(results, labels, "starved_sessions")),
        Panel("Errors", "of turns", by_label(results, labels, "error_rate")),
        Panel("First token, p90", "ms", by_label(results, labels, "ttft_ms.p90")),
        Panel("A turn, p50", "ms", by_label(results, labels, "step_latency_ms.p50")),
        Panel("A turn, p90", "ms", by_label(results, labels, "step_latency_ms.p90")),
    ]  # fmt: skip
    data = Panels(f"{ALL} SWE-like sessions, {LANES} at once, on 8 H100", shown)
    return [Drawing("003-versions", panels, data, "Seed 003's settings.")]


def _version_verdicts(results: Results) -> list[Finding]:
    return [
        _affinity(results),
        _fast_is_fast(results),
        _bimodal(results),
        *_higher_cap(results),
        *_honest(results),
        _physical(results),
        _ours(results),
    ]


def _pairs(results: Results, path: str, before: str, after: str) -> tuple[list[Pair], str]:
    """Return the metric at `path` before and after for both splits, and the numbers in words."""
    pairs, told = [], []
    for prefill in SPLITS:
        one = known(results[_name(before, prefill)], path)
        two = known(results[_name(after, prefill)], path)
        pairs.append((one, two))
        told.append(f"{prefill}P{GPUS - prefill}D {one:.3g} -> {two:.3g}")
    return pairs, ", ".join(told)


def _affinity(results: Results) -> Finding:
    pairs, told = _pairs(results, "fast_share", "v2", "v3")
    return Finding(
        "PD without session affinity has no fast path; with it there is one (v2 to v3)",
        "seed 003 v2, v3",
        all_of([one < 0.01 and two > one + 0.01 for one, two in pairs]),
        f"share of later turns on the fast path: {told} (v2's aborts are not simulated)",
    )


def _fast_is_fast(results: Results) -> Finding:
    holds, told = [], []
    base = known(results[DP], "ttft_ms.p50")
    for label in _labels("v3", "v4", "v5"):
        own = at(results[label], "fast_ttft_p50_ms")
        if own is not None:
            holds.append(own < base)
            told.append(f"{label} {own:.3g}")
    return Finding(
        "A turn on the fast path has its first token sooner than on 8 colocated workers",
        "seed 003 v3-v5",
        all_of(holds),
        f"TTFT p50 ms, colocated {base:.3g}; fast path: {', '.join(told)}",
    )


def _bimodal(results: Results) -> Finding:
    holds, told = [], []
    for label in _labels("v3"):
        starved = known(results[label], "starved_sessions")
        lucky = known(results[label], "lucky_sessions")
        holds.append(starved + lucky >= 0.8 and starved >= 0.2)
        told.append(f"{label}: {100 * starved:.3g} % of sessions never, {100 * lucky:.3g} % always")
    return Finding(
        "A hard cap of slots makes sessions bimodal: lucky or starved",
        "seed 003 v3",
        all_of(holds),
        "; ".join(told),
    )


def _higher_cap(results: Results) -> list[Finding]:
    fast, told = _pairs(results, "fast_share", "v3", "v4")
    wrong, errors = _pairs(results, "error_rate", "v3", "v4")
    return [
        Finding(
            "A cap of 16 slots instead of 4 puts more turns on the fast path",
            "seed 003 v4",
            all_of([two > one for one, two in fast]),
            f"fast path {told}",
        ),
        Finding(
            "With a cap of 16 slots errors appear",
            "seed 003 v4",
            all_of([two > one for one, two in wrong]),
            f"error rate {errors}",
        ),
    ]


def _honest(results: Results) -> list[Finding]:
    """Judge v5 against v4: errors can only vanish where there were some, and a path only shrink
    where there was one."""
    wrong, errors = _pairs(results, "error_rate", "v4", "v5")
    fast, told = _pairs(results, "fast_share", "v4", "v5")
    return [
        Finding(
            "When the worker's word decides, errors vanish",
            "seed 003 v5",
            all_of([two <= 0.1 * one for one, two in wrong if one > 0]),
            f"error rate {errors}",
        ),
        Finding(
            "When the worker's word decides, the fast path shrinks: errors and fallbacks are one "
            "pressure",
            "seed 003 v5",
            all_of([two < one for one, two in fast if one > 0]),
            f"fast path {told}",
        ),
    ]


def _physical(results: Results) -> Finding:
    best = min(
        _labels("v3", "v4", "v5"), key=lambda one: known(results[one], "step_latency_ms.p50")
    )
    own, base = (known(results[one], "step_latency_ms.p50") for one in (best, DP))
    return Finding(
        "Over all turns no slot setting reaches 8 colocated workers: device memory is the limit",
        "seed 003 v3-v5",
        all_of([own > base]),
        f"turn p50 {own:.3g} ms ({best}, the best) against {base:.3g} ms; p90 "
        f"{known(results[best], 'step_latency_ms.p90'):.3g} against "
        f"{known(results[DP], 'step_latency_ms.p90'):.3g} ms",
    )


def _ours(results: Results) -> Finding:
    paths = ["step_latency_ms.p50", "step_latency_ms.p90"]
    labels = [DP, *_labels(*VERSIONS)]
    if known(results[OURS], "error_rate") or known(results[DP], "error_rate"):
        paths.append("error_rate")  # where neither ever fails that says nothing
    holds, told = [], []
    for path in paths:
        best = min(labels, key=lambda one: known(results[one], path))
        own, other = known(results[OURS], path), known(results[best], path)
        holds.append(own <= other)
        told.append(f"{path} {own:.3g} against {other:.3g} ({best})")
    return Finding(
        "OwnerServe on the same 8 GPUs is no worse than any of them",
        "issue W6",
        all_of(holds),
        "; ".join(told),
    )


# -- the cliff ---------------------------------------------------------------------------------

LINES = ("8 colocated, KV-aware", "8 colocated, ownerserve", "1P7D, slots (v5)", "1P7D, delta")


def _cliff_jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for count in scale.of(SESSIONS, (4, 8)):
        jobs[f"{LINES[0]} {count}"] = _fleet(scale, "kv_aware", 0, count)
        jobs[f"{LINES[1]} {count}"] = _fleet(scale, "ownerserve", 0, count)
        jobs[f"{LINES[2]} {count}"] = _slotted(
            scale, 1, slots=None, backup="release-after-transfer", sessions=count
        )
        jobs[f"{LINES[3]} {count}"] = _fleet(scale, "static_pd_delta", 1, count)
    return jobs


def _cliff_figures(results: Results) -> list[Drawing]:
    counts = results.scale.of(SESSIONS, (4, 8))
    shown = []
    for title, unit, path in (
        ("First token, p90", "ms", "ttft_ms.p90"),
        ("A turn, p95", "ms", "step_latency_ms.p95"),
        ("Fast path", "of later turns", "fast_share"),
    ):
        lines = {
            line: [results[f"{line} {count}"] and _at(results, line, count, path)
                   for count in counts]
            for line in LINES
        }  # fmt: skip
        shown.append(Sweep(title, "sessions", unit, list(map(float, counts)), lines))
    data = Sweeps("The capacity cliff, 8 H100", shown)
    return [Drawing("003-cliff", sweeps, data, "More sessions than device memory holds.")]


def _at(results: Results, line: str, count: int, path: str) -> float | None:
    value: Any = results[f"{line} {count}"]
    for name in path.split("."):
        value = value[name]
    return None if value is None else float(value)


def _cliff_verdicts(results: Results) -> list[Finding]:
    counts = results.scale.of(SESSIONS, (4, 8))
    told, holds = [], []
    for line in LINES:
        ttft = [known(results[f"{line} {count}"], "ttft_ms.p90") for count in counts]
        ratio = ttft[-1] / ttft[0]
        holds.append(ratio > 3)
        told.append(f"{line} {ttft[0]:.3g} -> {ttft[-1]:.3g}")
    return [
        Finding(
            "Past what device memory holds latency falls off a cliff, in every setting",
            "seed 003 v5",
            all_of(holds),
            f"TTFT p90 ms from {counts[0]} to {counts[-1]} sessions: {'; '.join(told)}",
        )
    ]


# -- what seed 003 would tune next -------------------------------------------------------------


def _knob_jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {
        f"cap {cap}": _slotted(scale, 2, slots=cap) for cap in scale.of(CAPS, (1, 4))
    }
    backups: tuple[Backup, ...] = ("keep", "release-after-transfer")
    for backup in backups:
        jobs[backup] = _slotted(scale, 2, slots=None, backup=backup)
    for count in scale.of(IN_FLIGHT, (1,)):
        jobs[f"{count} in flight"] = _slotted(
            scale, 2, slots=None, backup="release-after-transfer", in_flight=count
        )
    return jobs


def _knob_tables(results: Results) -> list[ResultTable]:
    caption = "2P6D: slots a worker; what P keeps of what it sent; transfers at once."
    return [table_of(results, list(results.kept), COLUMNS, name="003-knobs", caption=caption)]


def _knob_verdicts(results: Results) -> list[Finding]:
    keep, release = (known(results[name], "step_latency_ms.p90")
                     for name in ("keep", "release-after-transfer"))  # fmt: skip
    flights = [name for name in results.kept if name.endswith("in flight")]
    found = [
        Finding(
            "Releasing P's backup after the transfer helps",
            "seed 003 v5, v6",
            all_of([release < 0.97 * keep]),
            f"turn p90 {release:.4g} ms released, {keep:.4g} ms kept; cached share "
            f"{known(results['release-after-transfer'], 'cached_token_share'):.3g} against "
            f"{known(results['keep'], 'cached_token_share'):.3g}",
        )
    ]
    free = known(results["release-after-transfer"], "step_latency_ms.p90")
    told = [f"{one} {known(results[one], 'step_latency_ms.p90'):.4g}" for one in flights]
    lost = known(results["release-after-transfer"], "error_rate")
    kept = [known(results[one], "error_rate") for one in flights]
    removed = [rate <= 0.1 * lost for rate in kept]
    found.append(
        Finding(
            "Limiting transfers in flight removes timeouts",
            "seed 003 v4",
            counted(sum(removed), len(removed) if lost else 0),
            f"error rate {lost:.3g} without a limit, {min(kept):.3g} at the best one; turn p90 ms: "
            f"{', '.join(told)}, no limit {free:.4g}",
        )
    )
    return found


_ABOUT = (
    f"{ALL} generated SWE-like sessions of about 85 turns and contexts to 100k tokens (4,373 "
    "turns; seed 003's trace has 4,449) on 8 H100 with Qwen3-30B-A3B: 13 GB of state a GPU, 135k "
    f"tokens. P to D over {TCP_GB_S:g} GB/s, timeout {TIMEOUT_S:g} s. "
)

EXPERIMENTS = [
    Experiment(
        name="003-versions",
        title="KVC's settings v2 to v5",
        source="seed 003",
        about=_ABOUT + f"{LANES} sessions at once. v2: PD in rotation, no affinity. v3, v4: a "
        "session takes one of 4 or 16 slots on a D worker and keeps it, past its end too; others "
        "fall back to plain PD. v5: a slot where the worker says that the prompt fits, P's copy "
        "released. A worker out of room releases idle sessions whole. v2's aborts and the 1 % of "
        "truncated answers are not simulated.",
        jobs=_version_jobs,
        verdicts=_version_verdicts,
        tables=_version_tables,
        figures=_version_figures,
    ),
    Experiment(
        name="003-cliff",
        title="The capacity cliff",
        source="seed 003 v5",
        about=_ABOUT + "The number of sessions that begin together is swept.",
        jobs=_cliff_jobs,
        verdicts=_cliff_verdicts,
        figures=_cliff_figures,
    ),
    Experiment(
        name="003-knobs",
        title="Slots, P's backup, transfers in flight",
        source="seed 003 v4-v6",
        about=_ABOUT + f"{LANES} sessions at once on 2P6D. What seed 003 names as next to tune, "
        "one at a time.",
        jobs=_knob_jobs,
        verdicts=_knob_verdicts,
        tables=_knob_tables,
    ),
]
