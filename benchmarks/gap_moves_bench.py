"""What sessions cost that move in their gaps, between two real hf workers: how long each is
nobody's, the bytes that it takes, and what a bystander's stream at the source hears of it.

    python benchmarks/gap_moves_bench.py [--rounds 5] [--sessions 8] [--tokens 7000]

Two hf workers (tiny-qwen3, one thread each) as processes, which own under a directory in this one.
In each round so many idle sessions of so many tokens move from one to the other, one after another,
while a stream decodes at their source; in the same round another stream decodes undisturbed.

nobody's    from asking the owner for a session until it is here, an upper bound: the worker's
            ownerserve_session_handover_seconds_total
bytes       that came from the source, for each byte of KV of the sessions' whole blocks
TPOT        between two events of the stream. Both workers and this process share the machine's
            cores: what computing beside it costs is in it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import TURN_HEADER, LenderAddress, TurnLine, encode_turn_line
from ownerserve.kv.wire.rpc import SessionTaken, Take
from ownerserve.kv.wire.status import WorkerStatus
from result import Row, report, smaller_is_better
from tests.support.hf.engine_rig import text
from tests.support.hf.owning_fleet import BootClock
from tests.support.hf.worker_process import WorkerProcess
from tests.support.waits import until

KEPT = ("--host-cache", "1GiB", "--kv-memory", "1GiB", "--dear")
STREAM_TOKENS = 4000
"""More than decode while sessions move: a stream is ended, not waited for."""
FIRST_EVENTS = 5
BLOCK_TOKENS = 16
"""Of a worker that is told nothing else."""
WAIT_S = 600.0
HANDOVER, CAME = "ownerserve_session_handover_seconds_total", "ownerserve_brought_bytes_total"


class MovedSession(NamedTuple):
    """What one session's move took, in ms, and for how many of these it was nobody's."""

    took_ms: float
    nobodys_ms: float
    bytes: float


class Bystander:
    """A stream that decodes at a worker until it is told to end; the times of its events."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.at_s: list[float] = []
        self._worker = worker
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: len(self.at_s) >= FIRST_EVENTS, within_s=WAIT_S, what="a stream decodes")

    def _read(self) -> None:
        told = encode_turn_line(TurnLine(target=self._worker.unit)).decode()
        body = {"prompt": text(64, seed=1), "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        asked = ("POST", "/v1/completions")
        with self._worker.http.stream(
            *asked, json={**body, "stream": True}, headers={TURN_HEADER: told}
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.at_s.append(time.perf_counter())
                if self._ends.is_set():
                    return

    def gaps_ms(self) -> list[float]:
        """End it, and return the times between its events."""
        self._ends.set()
        self._thread.join(WAIT_S)
        return [(b - a) * 1e3 for a, b in pairwise(self.at_s[FIRST_EVENTS:])]


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=7000)
    options = parser.parse_args()
    calm: list[float] = []
    disturbed: list[float] = []
    moves: list[MovedSession] = []
    directory = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    directory.start()
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            workers.append(WorkerProcess(Path(folder), "source", directory.address, *KEPT))
            workers.append(WorkerProcess(Path(folder), "target", directory.address, *KEPT))
            for round_ in track(range(options.rounds), console=Console(stderr=True)):
                names = [SessionId(f"{round_:016x}{n:016x}") for n in range(options.sessions)]
                for n, name in enumerate(names):
                    workers[0].serve(text(options.tokens, seed=1000 * round_ + n), name)
                stream = Bystander(workers[0])
                moved = move_all(*workers, names)
                disturbed += stream.gaps_ms()
                moves += moved
                stream = Bystander(workers[0])
                time.sleep(sum(one.took_ms for one in moved) / 1e3)
                calm += stream.gaps_ms()
            blocks = whole_block_bytes(workers[0], options.tokens)
        finally:
            for worker in workers:
                worker.stop()
            directory.stop()
    report("gap_moves_bench", rows(moves, calm, disturbed, blocks_bytes=blocks))


def move_all(
    source: WorkerProcess, target: WorkerProcess, names: list[SessionId]
) -> list[MovedSession]:
    """Have the target take the sessions, one after another."""
    found = []
    for name in names:
        before = [target.metric(metric) for metric in (HANDOVER, CAME)]
        started_s = time.perf_counter()
        taken = target.asked(Take(name, LenderAddress(source.unit, source.rpc)))
        took_ms = (time.perf_counter() - started_s) * 1e3
        assert isinstance(taken, SessionTaken), taken
        after = [target.metric(metric) for metric in (HANDOVER, CAME)]
        found.append(MovedSession(took_ms, (after[0] - before[0]) * 1e3, after[1] - before[1]))
    return found


def whole_block_bytes(worker: WorkerProcess, tokens: int) -> float:
    """Return the KV bytes of the whole blocks of so many tokens and an answer of four."""
    status = msgspec.json.decode(worker.http.get("/ownerserve/status").content, type=WorkerStatus)
    return (tokens + 3) // BLOCK_TOKENS * BLOCK_TOKENS * float(status.profile.kv_bytes_per_token)


def rows(
    moves: list[MovedSession], calm: list[float], disturbed: list[float], *, blocks_bytes: float
) -> list[Row]:
    """Return what is reported."""
    took = [one.took_ms for one in moves]
    nobodys = [one.nobodys_ms for one in moves]
    mib = blocks_bytes / 2**20
    return [
        Row(f"a move of {mib:.1f} MiB", "ms", median(took), ours_span=middle(took)),
        Row("a session is nobody's: median", "ms", median(nobodys), ours_span=middle(nobodys)),
        Row(f"a session is nobody's: p99 of {len(moves)}", "ms", p99(nobodys)),
        Row(
            "bytes a move for each byte of its KV",
            "ratio",
            median(one.bytes for one in moves) / blocks_bytes,
        ),
        smaller_is_better(
            "a bystander's TPOT while sessions leave, median", "ms", median(disturbed),
            other=median(calm), other_name="undisturbed",
        ),
        smaller_is_better(
            "a bystander's TPOT while sessions leave, p99", "ms", p99(disturbed),
            other=p99(calm), other_name="undisturbed",
        ),
    ]  # fmt: skip


def p99(values: list[float]) -> float:
    """Return the 99th percentile; of fewer than a hundred values the largest."""
    return quantiles(values, n=100, method="inclusive")[-1]


def middle(values: list[float]) -> tuple[float, float]:
    """Return the middle half of the values."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


if __name__ == "__main__":
    main()
