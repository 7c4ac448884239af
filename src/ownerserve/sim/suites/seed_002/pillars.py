"""This experiment switches off affinity and migration, each alone (seed 002, figure 7)."""

from __future__ import annotations

from collections.abc import Mapping

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Results,
    ResultTable,
    Scale,
    at,
    by_label,
    known,
    table_of,
)
from ownerserve.sim.suites.fleet import simulate
from ownerserve.sim.suites.judging import all_of, first_of

NEVER_MS = 1e12
VARIANTS = ("neither", "affinity only", "migration only", "both (EAR)")
COLUMNS = {
    "step p95 (ms)": "step_latency_ms.p95",
    "TTFT p90 (ms)": "ttft_ms.p90",
    "cached share": "cached_token_share",
    "hotspot index": "hotspot_index",
    "interference index": "interference_index",
    "migrations": "migrations.count",
    "network KV (bytes)": "network_kv_bytes",
    "task mean (s)": "e2e_s.mean",
}


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        "neither": simulate("least_load", scale),
        "affinity only": simulate("ear", scale, hot_ms=NEVER_MS),
        "migration only": simulate("ear", scale, hot_ms=0.0, cool_s=0.0),
        "both (EAR)": simulate("ear", scale),
    }


def _verdicts(results: Results) -> list[Finding]:
    share = {name: known(results[name], "cached_token_share") for name in VARIANTS}
    p95 = {name: known(results[name], "step_latency_ms.p95") for name in VARIANTS}
    both, alone, moving, neither = (p95[n] for n in ("both (EAR)", *VARIANTS[1:3], VARIANTS[0]))
    caught = all_of([share["migration only"] < share["both (EAR)"] - 0.02])
    return [
        _doubled(results, share),
        Finding(
            "Migration alone does not catch locality", "seed 002 §5.3",
            caught if at(results["migration only"], "migrations.count") else Verdict.NOT_SHOWN,
            f"cached share {share['migration only']:.1%} against {share['both (EAR)']:.1%}: "
            "a session that moves takes its state along",
        ),
        Finding(
            "Both pillars are needed", "seed 002 §5.3",
            first_of(both < min(alone, moving, neither), both < max(alone, moving)),
            f"turn p95 {both / 1e3:.3g} s; affinity only {alone / 1e3:.3g} s, migration only "
            f"{moving / 1e3:.3g} s, neither {neither / 1e3:.3g} s",
        ),
    ]  # fmt: skip


def _doubled(results: Results, share: Mapping[str, float]) -> Finding:
    claim, source = "Affinity alone keeps locality and doubles interference", "seed 002 §5.3"
    paths = ("interference_index", "hotspot_index")
    alone, both = ([at(results[name], path) for path in paths] for name in VARIANTS[1::2])
    if not all((*alone, *both)):
        return Finding(claim, source, Verdict.NOT_SHOWN, "no turn waited: 0 queues")
    doubled, pinned = (a / b for a, b in zip(alone, both, strict=True) if a and b)
    kept = share["affinity only"] >= share["both (EAR)"] - 0.1
    return Finding(
        claim, source, first_of(doubled >= 1.8 and kept, doubled >= 1.8 or pinned >= 1.8),
        f"interference index {alone[0]:.3g} against {both[0]:.3g} ({doubled:.2f}x), hotspot index "
        f"{pinned:.2f}x, cached share {share['affinity only']:.1%} against "
        f"{share['both (EAR)']:.1%}",
    )  # fmt: skip


def _tables(results: Results) -> list[ResultTable]:
    caption = (
        "Neither: least load. Affinity only: T_hot is infinite. Migration only: T_hot = 0 and "
    )
    caption += "T_cool = 0, so a session goes wherever less is pending."
    return [table_of(results, VARIANTS, COLUMNS, name="002-f7-pillars", caption=caption)]


def _figures(results: Results) -> list[Drawing]:
    shown = [
        Panel("A turn, p95", "ms", by_label(results, VARIANTS, "step_latency_ms.p95")),
        Panel("First token, p90", "ms", by_label(results, VARIANTS, "ttft_ms.p90")),
        Panel("Cached share", "", by_label(results, VARIANTS, "cached_token_share"), "higher"),
        Panel("Interference index", "", by_label(results, VARIANTS, "interference_index")),
    ]
    data = Panels("The two pillars of EAR, each switched off", shown, columns=2)
    return [Drawing("002-f7-pillars", panels, data, "Ablation (seed 002, f7).")]


EXPERIMENTS = [
    Experiment(
        name="002-f7",
        title="EAR without one of its pillars",
        source="seed 002 §5.3, f7",
        about="EAR on equal turns with affinity, migration, both or neither.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    )
]
