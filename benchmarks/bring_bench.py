"""What a turn costs where its session's state is here, at a peer, or nowhere: time to first token.

    python benchmarks/bring_bench.py [--rounds 9] [--tokens 7000]

Two hf workers (tiny-qwen3, one thread each) as processes. A session has left `--tokens` tokens on
one; its next turn of 40 more runs

    append      where the state is
    shm, readv, tcp     at the other worker, which reads the state from the first by that road
    cold        at the other worker, which computes all of it

by turns in each round, of a session of its own each. TTFT is the time of an answer of one token,
over HTTP. The machine's other work counts: compare within a run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import LenderAddress
from result import report, smaller_is_better
from tests.support.hf.engine_rig import text
from tests.support.hf.worker_process import WorkerProcess

ROADS = ("shm", "readv", "tcp")
KEPT = ("--host-cache", "1GiB", "--kv-memory", "1GiB", "--dear")


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=7000)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = WorkerProcess(Path(folder), "home", None, *KEPT)
        others = {
            road: WorkerProcess(Path(folder), road, None, *KEPT, "--transfer-roads", road)
            for road in ROADS
        }
        try:
            for round_ in track(range(options.rounds), console=Console(stderr=True)):
                for way, ms in one_round(home, others, round_, options.tokens):
                    found.setdefault(way, []).append(ms)
        finally:
            for worker in (home, *others.values()):
                worker.stop()
    cold = median(found.pop("cold"))
    rows = [
        smaller_is_better(
            f"a turn behind {options.tokens} tokens, {way}",
            "ms",
            median(times),
            other=cold,
            other_name="computed anew",
        )
        for way, times in found.items()
    ]
    report("bring_bench", rows)


def one_round(
    home: WorkerProcess, others: dict[str, WorkerProcess], round_: int, tokens: int
) -> list[tuple[str, float]]:
    """Return each way with what its turn took, in ms."""
    lender = LenderAddress(home.unit, home.rpc)
    times = []
    for number, way in enumerate(("append", *ROADS, "cold")):
        name = SessionId(f"{round_:016x}{number:016x}")
        prompt = text(tokens, seed=1000 * round_ + number)
        said = home.serve(prompt, name)
        longer = [*prompt, *said["tokens"], *text(40, seed=number)]
        worker = others.get(way, home if way == "append" else others["tcp"])
        told = {"bring_from": lender} if way in ROADS else {}
        started_s = time.perf_counter()
        answer = worker.serve(longer, name, **told)
        times.append((way, (time.perf_counter() - started_s) * 1e3))
        cold = answer["cached"] < tokens // 2
        assert cold == (way == "cold"), (way, answer["cached"])
    return times


if __name__ == "__main__":
    main()
