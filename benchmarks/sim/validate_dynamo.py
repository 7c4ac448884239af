"""The simulator against Dynamo's offline replay (ai-dynamo-runtime 1.6.1) at equal costs.

    python benchmarks/sim/validate_dynamo.py [--repeats 3] [--traces FOLDER]

The Mooncake conversation trace as it was recorded (open loop), eight workers, blocks of 512, equal
pools, 8,192 tokens a step, 256 sequences, Dynamo's own polynomial for a step's time on both sides,
eviction by age on both. Round robin: requests in the file's order, each a session of its own; then
every request is compared. KV router: Dynamo's scores blocks it has indexed, ours (policy "dynamo")
what sessions were last told to hold, so sessions are inferred; the means are compared. Ours has a
soft affinity that Dynamo's offline replay has not: it runs with and without. Dynamo breaks ties at
random: it runs several times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import dynamo_side as dynamo  # noqa: E402
from untouched import Untouched  # noqa: E402

from ownerserve.cache.policies.block_lru import BlockLru  # noqa: E402
from ownerserve.cache.pools.budget import ZERO_SLOTS  # noqa: E402
from ownerserve.router.policies import dynamo as dynamo_policy  # noqa: E402
from ownerserve.sim import build  # noqa: E402
from ownerserve.sim.config.setup import SimSetup  # noqa: E402
from ownerserve.sim.run import simulate  # noqa: E402
from ownerserve.sim.workload import Open, WorkloadShape  # noqa: E402
from ownerserve.trace.model import Trace, TraceRequest, TraceSession  # noqa: E402
from ownerserve.trace.read import read_trace  # noqa: E402
from ownerserve.trace.readers.base import Chainer  # noqa: E402
from result import Row, report  # noqa: E402

NAME = "Dynamo 1.6.1"
AS_THEIRS = build.BaselineParts(order=BlockLru, node=Untouched)
"""Its mocker's blocks go as vLLM's do: the oldest read first, and only when room is wanted."""


def flat(path: Path) -> Trace:
    """The file's requests in its order, each a session of its own."""
    chainer, sessions = Chainer(), []
    for number, line in enumerate(path.read_bytes().splitlines()):
        row = msgspec.json.decode(line)
        runs = chainer.runs(row["hash_ids"])
        request = TraceRequest(0.0, row["input_length"], row["output_length"], runs)
        sessions.append(TraceSession(f"r{number}", (request,), row["timestamp"] / 1000.0))
    return Trace(
        name=path.stem,
        origin="mooncake",
        block_tokens=dynamo.BLOCK_TOKENS,
        ids="trace",
        grouping="unknown",
        arrivals="recorded",
        sessions=tuple(sessions),
    )


def ours(
    trace: Trace, policy: str, pool: tuple[int, int], parts: build.BaselineParts = AS_THEIRS
) -> Any:
    """The rows of a run at Dynamo's costs, in order of release."""
    blocks, slot_bytes = pool
    setup = SimSetup(
        policy=policy,
        workers=dynamo.WORKERS,
        kv_bytes=(blocks + ZERO_SLOTS) * slot_bytes,
        step_tokens=dynamo.STEP_TOKENS,
        running=dynamo.RUNNING,
        shape=WorkloadShape(mode=Open(), output_reuse="never"),
    )
    pace = dynamo.polynomial(blocks)
    with mock.patch.object(build, "pace_of", lambda name: pace):
        table = simulate(trace, setup, parts=parts).rows.table()
    return table[np.argsort(table["number"], kind="stable")]


def theirs_in_order(requests: Path, trace: Trace) -> list[dict[str, Any]]:
    """Dynamo's report in the trace's order. Requests alike in time and lengths keep their order."""
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for line in requests.read_bytes().splitlines():
        row = msgspec.json.decode(line)
        found[round(row["arrival_time_ms"]), row["input_length"], row["output_length"]].append(row)
    return [
        found[
            round(session.start_s * 1000),
            session.requests[0].input_tokens,
            session.requests[0].output_tokens,
        ].pop(0)
        for session in trace.sessions
    ]


def means(table: Any) -> tuple[float, float, float]:
    """(reuse as a share of prompt tokens, TTFT mean ms, end to end mean ms)."""
    reuse = float(table["cached_tokens"].sum() / table["prompt_tokens"].sum())
    ttft_ms = float((table["first_token_s"] - table["arrived_s"]).mean() * 1e3)
    return reuse, ttft_ms, float((table["done_s"] - table["arrived_s"]).mean() * 1e3)


def compared(label: str, table: Any, summary: dict[str, Any]) -> list[Row]:
    reuse, ttft_ms, e2e_ms = means(table)
    their_reuse, their_ttft_ms = summary["prefix_cache_reused_ratio"], summary["mean_ttft_ms"]
    rows = [
        Row(f"{label}: prefix reuse", "%", 100 * reuse, 100 * their_reuse, NAME),
        Row(
            f"{label}: prefix reuse, difference",
            "points",
            100 * abs(reuse - their_reuse),
            goal="<= 0.5",
        ),
        Row(f"{label}: TTFT mean", "ms", ttft_ms, their_ttft_ms, NAME),
        Row(
            f"{label}: TTFT mean, difference",
            "%",
            100 * abs(ttft_ms / their_ttft_ms - 1),
            goal="<= 5",
        ),
        Row(f"{label}: end to end mean", "ms", e2e_ms, summary["mean_e2e_latency_ms"], NAME),
    ]
    ttft = (table["first_token_s"] - table["arrived_s"]) * 1e3
    for name, q in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        mine, other = float(np.quantile(ttft, q)), summary[f"{name}_ttft_ms"]
        rows.append(Row(f"{label}: TTFT {name}", "ms", mine, other, NAME))
    return rows


def by_request(table: Any, theirs: list[dict[str, Any]]) -> list[Row]:
    """How many requests agree, one by one."""
    ttft = (table["first_token_s"] - table["arrived_s"]) * 1e3
    other = np.array([row["ttft_ms"] for row in theirs])
    reused = np.array([row["reused_input_tokens"] for row in theirs])
    worker = np.array([row["decode_worker_idx"] for row in theirs])
    differ = np.flatnonzero(reused != table["cached_tokens"])
    more = sum(int(reused[i]) > int(table["cached_tokens"][i]) for i in differ)
    shares = {
        "on the same worker": (worker == table["worker"]).mean(),
        "with equal cached tokens": 1.0 - len(differ) / len(table),
        "with TTFT within 5 %": (np.abs(ttft / other - 1.0) <= 0.05).mean(),
    }
    return [
        *(Row(f"round robin: requests {k}", "%", 100 * float(v)) for k, v in shares.items()),
        Row("round robin: requests with other cached tokens", "count", len(differ)),
        Row("round robin: of these, Dynamo has more", "count", more),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traces", type=Path, default=dynamo.ROOT.parent / "shared" / "traces")
    given = parser.parse_args()
    file = given.traces / dynamo.MOONCAKE
    pool = dynamo.pool()
    blocks = pool[0]
    with tempfile.TemporaryDirectory() as scratch:
        plain = dynamo.unpack(file, Path(scratch))
        trace = flat(plain)
        requests = Path(scratch) / "requests.jsonl"
        answer = dynamo.replay(plain, "round_robin", blocks=blocks, requests=requests)
        table = ours(trace, "round_robin", pool)
        rows = compared("round robin", table, answer["summary"])
        rows += by_request(table, theirs_in_order(requests, trace))
        table = ours(trace, "round_robin", pool, build.BaselineParts())
        rows += compared("round robin, our order and watermarks", table, answer["summary"])
        routed = [dynamo.replay(plain, "kv_router", blocks=blocks) for _ in range(given.repeats)]
    names = routed[0]["summary"].keys()
    numbers = [k for k in names if isinstance(routed[0]["summary"][k], int | float)]
    mean = {k: float(np.mean([run["summary"][k] for run in routed])) for k in numbers}
    sessions = read_trace(file)
    table = ours(sessions, "dynamo", pool)
    rows += compared("KV router, ours with soft affinity", table, mean)
    with mock.patch.object(dynamo_policy, "AFFINITY_SHARE", 0.0):
        table = ours(sessions, "dynamo", pool)
    rows += compared("KV router, no affinity", table, mean)
    for metric in ("prefix_cache_reused_ratio", "mean_ttft_ms"):
        values = [run["summary"][metric] for run in routed]
        rows.append(Row(f"KV router: {metric}, least of runs", "", min(values), None, NAME))
        rows.append(Row(f"KV router: {metric}, most of runs", "", max(values), None, NAME))
    report("sim_dynamo", rows, others={"ai-dynamo-runtime": answer["version"]})


if __name__ == "__main__":
    main()
