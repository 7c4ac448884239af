"""How fast the simulator is: requests a CPU second, in turns with Dynamo's replay on one machine.

    python benchmarks/sim_bench.py [--only mooncake,claude-code,fleet] [--rounds 3]
    python benchmarks/sim_bench.py --scale 1000000         so many turns on 1,000 workers: minutes

    mooncake      conversation trace as recorded, 8 engines, 512-token blocks, beside Dynamo
    claude-code   all 570 sessions, closed loop, 64 at once, 64-token blocks, 8 engines
    fleet         50,000 turns of drawn sessions on 1,000 engines, 8,000 at once
    scale-N       the same, N turns (--scale N): one run, with its course on the screen

Each run is a process of its own: CPU seconds of user and system, peak memory of all of it. Rates
are of the replay; reading the trace is counted beside it, and for Dynamo in it. Medians of rounds.
Without Dynamo's environment (benchmarks/sim/dynamo_side.py) our rows stand alone.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "sim"))

import dynamo_side  # noqa: E402

from ownerserve.kv.errors import InvalidInput  # noqa: E402
from ownerserve.sim.config.setup import SimSetup  # noqa: E402
from ownerserve.sim.pool import settled_heap  # noqa: E402
from ownerserve.sim.run import simulate  # noqa: E402
from ownerserve.sim.workload import Capped, Open, Sample, WorkloadShape  # noqa: E402
from ownerserve.trace.read import read_trace  # noqa: E402
from result import Row, larger_is_better, report  # noqa: E402

TRACES = ROOT.parent / "shared" / "traces"
CLAUDE_CODE = "claude-code-weka/sessions.jsonl.zst"
COURSE_TURNS = 50_000
TURNS_A_SESSION = 64.4
"""Of the Claude-Code trace: how many sessions make so many turns."""
POLICIES = ("ownerserve", "dynamo", "round_robin")


class Run(msgspec.Struct, frozen=True):
    """One run, measured in its own process."""

    requests: int
    replay_cpu_s: float
    read_cpu_s: float
    rss_mb: float

    @property
    def rate(self) -> float:
        """Requests a CPU second of the replay."""
        return self.requests / self.replay_cpu_s


class Case(msgspec.Struct, frozen=True):
    """What is run: a trace's file and a setup."""

    file: str
    setup: SimSetup


def case_of(name: str) -> Case:
    """`kind` or `kind:policy`."""
    kind, _, policy = name.partition(":")
    policy = policy or "ownerserve"
    if kind == "mooncake":
        shape = WorkloadShape(mode=Open(), output_reuse="never")
        return Case(dynamo_side.MOONCAKE, SimSetup(policy=policy, workers=8, shape=shape))
    if kind == "claude-code":
        return Case(CLAUDE_CODE, SimSetup(policy=policy, shape=WorkloadShape(mode=Capped(64))))
    turns = 50_000 if kind == "fleet" else int(kind.removeprefix("scale-"))
    sessions = Sample(round(turns / TURNS_A_SESSION))
    shape = WorkloadShape(mode=Capped(8_000), sessions=sessions)
    return Case(CLAUDE_CODE, SimSetup(policy=policy, workers=1_000, shape=shape))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Course:
    """Says on the way what turns cost and what is held: whether cost stays as it is."""

    def __init__(self) -> None:
        self._told, self._cpu_s = 0, cpu_s()

    def __call__(self, ended: int, total: int) -> None:
        if ended < self._told + COURSE_TURNS:
            return
        each_us = (cpu_s() - self._cpu_s) / (ended - self._told) * 1e6
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{ended:,} of {total:,}: {each_us:.0f} us a turn, peak {peak_mb:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
        self._told, self._cpu_s = ended, cpu_s()


def measure(name: str, traces: Path) -> Run:
    """Run the case here."""
    case = case_of(name)
    before = cpu_s()
    trace = read_trace(traces / case.file)
    read_s = cpu_s() - before
    gc.collect()
    with settled_heap():
        before = cpu_s()
        result = simulate(trace, case.setup, Course() if name.startswith("scale-") else None)
        replay_s = cpu_s() - before
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Run(len(result.rows), replay_s, read_s, peak_mb)


def apart(name: str, traces: Path) -> Run:
    """Run the case in a process of its own."""
    command = [sys.executable, str(HERE / "sim_bench.py"), "--one", name, "--traces", str(traces)]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Run)
    print(
        f"{name}: {run.requests:,} requests, {run.replay_cpu_s:.2f} CPU s + "
        f"{run.read_cpu_s:.2f} reading, {run.rate:,.0f}/s, {run.rss_mb:.0f} MB, "
        f"{time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return run


def mooncake(traces: Path, rounds: int) -> list[Row]:
    """Ours and Dynamo's in turns."""
    ours: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    theirs: dict[str, list[dict[str, Any]]] = {"kv_router": [], "round_robin": []}
    with tempfile.TemporaryDirectory() as scratch:
        plain = dynamo_side.unpack(traces / dynamo_side.MOONCAKE, Path(scratch))
        blocks, _ = dynamo_side.pool()
        for _ in range(rounds):
            for router, found in theirs.items():
                try:
                    found.append(dynamo_side.replay(plain, router, blocks=blocks))
                except InvalidInput as missing:
                    print(missing)
                else:
                    print(f"Dynamo {router}: {found[-1]['cpu_s']:.2f} CPU s", flush=True)
            for policy, runs in ours.items():
                runs.append(apart(f"mooncake:{policy}", traces))
    rows = []
    for policy, runs in ours.items():
        rate = median(run.rate for run in runs)
        goal = ">= 10,000" if policy == "ownerserve" else ""
        rows.append(Row(f"mooncake, {policy}", "requests/CPU s", rate, goal=goal))
        whole = median(run.requests / (run.replay_cpu_s + run.read_cpu_s) for run in runs)
        for router, found in theirs.items():
            if found:
                other = median(runs[0].requests / run["cpu_s"] for run in found)
                rows.append(
                    larger_is_better(
                        f"mooncake, {policy}, with reading",
                        "requests/CPU s",
                        whole,
                        other=other,
                        other_name=f"Dynamo {router}",
                        goal=">= 3x" if router == "kv_router" else "",
                    )
                )
        rss_mb = max(run.rss_mb for run in runs)
        beside = max((run["rss_mb"] for found in theirs.values() for run in found), default=None)
        rows.append(Row(f"mooncake, {policy}, memory", "MB", rss_mb, beside, "Dynamo"))
    return rows


GOALS = {
    "claude-code": (">= 5,000", "<= 15", "<= 400"),
    "fleet": ("", "", ""),
    "scale-1000000": ("", "<= 200", "<= 2,000"),
}


def alone(kind: str, traces: Path, rounds: int) -> list[Row]:
    """A case that nothing comparable runs."""
    runs = [apart(kind, traces) for _ in range(rounds)]
    rate, seconds, memory = GOALS.get(kind, ("", "", ""))
    whole_s = median(run.replay_cpu_s + run.read_cpu_s for run in runs)
    return [
        Row(f"{kind}: replay", "requests/CPU s", median(run.rate for run in runs), goal=rate),
        Row(f"{kind}: {runs[0].requests:,} turns, with reading", "CPU s", whole_s, goal=seconds),
        Row(f"{kind}: memory", "MB", max(run.rss_mb for run in runs), goal=memory),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="mooncake,claude-code,fleet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--scale", type=int, metavar="TURNS", help="one run of so many turns")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(msgspec.json.encode(measure(given.one, given.traces)).decode())
        return
    if given.scale:
        report("sim_bench_scale", alone(f"scale-{given.scale}", given.traces, 1), others={})
        return
    rows: list[Row] = []
    for kind in given.only.split(","):
        if kind == "mooncake":
            rows += mooncake(given.traces, given.rounds)
        else:
            rows += alone(kind, given.traces, given.rounds)
    report("sim_bench", rows, others={"ai-dynamo-runtime": "1.6.1"})


if __name__ == "__main__":
    main()
