"""The simulator against measured vLLM: 300 requests on Qwen3-30B-A3B, two ranks, vLLM 0.19.

    python benchmarks/sim/validate_truth.py [FOLDER]

FOLDER holds the shared llmservingsim-vllm-groundtruth files. Only arrivals and lengths of the run
go in; its times are what comes out. The pace beside this file is tools/fit_vllm_truth.py's, fitted
without a time of this run. Two readings of the same machine, since the simulator has no lockstep:

    one engine    both ranks as one: 256 sequences, 4,096 tokens a step
    two engines   a rank each: 128 sequences, 2,048 tokens, least_load; a step takes what the one
                  engine's takes when both ranks carry the same

An arrival is the moment at which vLLM queued the request, as the published comparison has it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from ownerserve.sim.config.setup import SimSetup  # noqa: E402
from ownerserve.sim.engine.pace import PaceFile, load_pace_file  # noqa: E402
from ownerserve.sim.run import simulate  # noqa: E402
from ownerserve.sim.workload import Open, WorkloadShape  # noqa: E402
from ownerserve.trace.model import Trace, TraceRequest, TraceSession  # noqa: E402
from result import Row, report  # noqa: E402

FOLDER = ROOT.parent / "shared" / "traces" / "llmservingsim-vllm-groundtruth"
RUN = "RTXPRO6000-Qwen3-30B-A3B-Instruct-2507.requests.jsonl"
PACE = HERE / "qwen3-30b-a3b-dp2@rtx-pro-6000.json"
COMPUTED_SHARE = 0.924
"""Of prompt tokens: the run cached prefixes and does not say which (tools/fit_vllm_truth.py)."""
BLOCK_TOKENS = 16
PUBLISHED = {"TTFT": -0.136, "TPOT": -0.017, "E2E": -0.022}
"""Errors of LLMServingSim 2.0, from the same folder's summary."""

Floats = NDArray[np.float64]


class Times(NamedTuple):
    """A run's requests: seconds from the first arrival, and how many tokens were answered."""

    queued: Floats
    first: Floats
    last: Floats
    output: NDArray[np.int64]

    def metrics(self) -> dict[str, Floats]:
        """By request, in ms."""
        return {
            "TTFT": (self.first - self.queued) * 1e3,
            "TPOT": (self.last - self.first) / np.maximum(self.output - 1, 1) * 1e3,
            "E2E": (self.last - self.queued) * 1e3,
        }


def measured(rows: list[dict[str, Any]]) -> Times:
    start = rows[0]["queued_ts"]
    queued, first, last = (
        np.array([row[name] - start for row in rows])
        for name in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    return Times(queued, first, last, np.array([row["output_toks"] for row in rows]))


class Hits(StrEnum):
    """How the cached 7.6 % of the prompt tokens are modelled: nobody knows which they were."""

    SHARED_HEADS = "shared heads"
    """Every prompt begins with so much of one text: found in the cache, and attended to."""
    CUT_PROMPTS = "prompts cut"
    """Prompts are shorter by it: decodes see too little context."""
    NONE = "no hits"


def trace_of(rows: list[dict[str, Any]], hits: Hits) -> Trace:
    """Each request a session of its own, at the time at which it was queued."""
    start = rows[0]["queued_ts"]
    sessions = []
    free = max(row["input_toks"] for row in rows)  # ids below are those of the shared text
    for row in rows:
        tokens = row["input_toks"]
        if hits is Hits.CUT_PROMPTS:
            tokens = max(1, round(tokens * COMPUTED_SHARE))
        shared = round(tokens * (1.0 - COMPUTED_SHARE) / BLOCK_TOKENS)
        head = ((0, shared),) if hits is Hits.SHARED_HEADS and shared else ()
        own = tokens // BLOCK_TOKENS - sum(count for _, count in head)
        runs = (*head, (free, own)) if own else head
        free += own
        request = TraceRequest(0.0, tokens, row["output_toks"], runs=runs)
        sessions.append(TraceSession(row["request_id"], (request,), row["queued_ts"] - start))
    return Trace(
        name="vllm-groundtruth",
        origin=RUN,
        block_tokens=BLOCK_TOKENS,
        ids="trace",
        grouping="unknown",
        arrivals="recorded",
        sessions=tuple(sessions),
    )


def rank_pace(both: PaceFile) -> PaceFile:
    """One rank's pace when the other carries as much: what depends on load counts twice."""
    doubled = {name: 2 * getattr(both, name) for name in ("b_ms", "c_ms", "d_ms", "e_ms")}
    return msgspec.structs.replace(
        both,
        **doubled,
        name=f"{both.name} (a rank)",
        gpus=1,
        expert_share=1.0 - (1.0 - both.expert_share) ** 2,
        kv_bytes_total=both.kv_bytes_total // 2,
    )


def simulated(trace: Trace, setup: SimSetup) -> Times:
    table = simulate(trace, setup).rows.table()
    table = table[np.argsort(table["session"])]
    return Times(
        table["arrived_s"], table["first_token_s"], table["done_s"], table["output_tokens"]
    )


def setups(folder: Path) -> dict[str, SimSetup]:
    """Both readings of the machine."""
    both = load_pace_file(PACE)
    rank = folder / "rank.json"
    rank.write_bytes(msgspec.json.encode(rank_pace(both)))
    shape = WorkloadShape(mode=Open(), output_reuse="never")
    return {
        "one engine": SimSetup(
            policy="least_load",
            workers=1,
            pace=str(PACE),
            step_tokens=4096,
            running=256,
            shape=shape,
        ),
        "two engines": SimSetup(
            policy="least_load",
            workers=2,
            pace=str(rank),
            step_tokens=2048,
            running=128,
            shape=shape,
        ),
    }


def compare(name: str, ours: Times, real: Times) -> list[Row]:
    """Mean errors, with the published simulator's beside them; our other quantiles alone."""
    rows = []
    theirs = real.metrics()
    for metric, values in ours.metrics().items():
        true = theirs[metric]
        error = float(values.mean() / true.mean() - 1.0)
        other = PUBLISHED[metric]
        rows.append(
            Row(
                f"{name}: {metric} mean",
                "error %",
                100 * error,
                100 * other,
                "LLMServingSim 2.0",
                abs(other / error),
                "closer than LLMServingSim",
            )
        )
        for label, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            wrong = float(np.quantile(values, q) / np.quantile(true, q) - 1.0)
            rows.append(Row(f"{name}: {metric} {label}", "error %", 100 * wrong))
        apart = np.abs(values - true) / np.maximum(true, 1e-9)
        rows.append(
            Row(f"{name}: {metric}, median request", "abs error %", 100 * float(np.median(apart)))
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    lines = (folder / RUN).read_bytes().splitlines()
    runs = sorted((msgspec.json.decode(line) for line in lines), key=lambda r: r["queued_ts"])
    real = measured(runs)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, setup in setups(Path(scratch)).items():
            for hits in Hits:
                rows += compare(f"{name}, {hits}", simulated(trace_of(runs, hits), setup), real)
    for metric, values in real.metrics().items():
        rows.append(Row(f"measured: {metric} mean", "ms", float(values.mean())))
    report("sim_truth", rows)


if __name__ == "__main__":
    main()
