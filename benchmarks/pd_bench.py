"""What a prompt computed at another worker costs and spares, between real hf workers.

    python benchmarks/pd_bench.py [--rounds 7] [--tokens 7000] [--added 1500]

Workers of tiny-qwen3 as processes, a thread each. The machine's other work counts: compare within
a run.

bystander   a stream decodes at D when a prompt of `--tokens` comes: the longest pause between two
            of its tokens, where D computes the prompt, and where P does
sending     bytes that D had read when P was done, of all that it read (goal 90 %)
bytes       KV bytes that cross for a session's turn of `--added` tokens behind `--tokens`: to a D
            that keeps the session (delta), to one that has nothing of it (the full prompt)
TTFT        of such a turn: append at its owner, prompt computed at P and read by D, state read
            from the owner by another worker, all computed anew
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import LenderAddress
from result import Row, larger_is_better, report, smaller_is_better
from tests.support.hf.engine_rig import text
from tests.support.hf.worker_process import WorkerProcess

KEPT = ("--host-cache", "1GiB", "--kv-memory", "1GiB", "--dear")
STREAM_TOKENS = 4000
"""More than a bystander says while a prompt is computed: it is hung up on."""


class Bystander:
    """A stream at a worker, and when each of its tokens came."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.at_s: list[float] = []
        self._is_over = threading.Event()
        self._url = worker.url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {"prompt": text(64, seed=1), "max_tokens": STREAM_TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.at_s.append(time.perf_counter())
                if self._is_over.is_set():
                    return

    def wait_for(self, tokens: int) -> None:
        """Return once it has said so many."""
        while len(self.at_s) < tokens:
            time.sleep(0.01)

    def stop(self) -> None:
        """Hang up."""
        self._is_over.set()
        self._thread.join()

    def longest_pause_ms(self, since_s: float) -> float:
        """Return the longest time between two of its tokens from then on."""
        late = [at_s for at_s in self.at_s if at_s >= since_s]
        return max((b - a) * 1e3 for a, b in pairwise(late))


class Fleet:
    """A worker that computes for others, one that answers, and one that begins with nothing."""

    def __init__(self, folder: Path) -> None:
        self.p, self.d, self.other = (
            WorkerProcess(folder, name, None, *KEPT) for name in ("p", "d", "other")
        )

    def close(self) -> None:
        """Stop all."""
        for worker in (self.p, self.d, self.other):
            worker.stop()


def address(worker: WorkerProcess) -> LenderAddress:
    """Where a worker is asked by others."""
    return LenderAddress(worker.unit, worker.rpc)


def timed(
    worker: WorkerProcess, prompt: list[int], name: SessionId, **line: Any
) -> tuple[float, str]:
    """Serve a turn; return what it took in ms, and the mode that its answer says."""
    started_s = time.perf_counter()
    answer = worker.serve(prompt, name, **line)
    return (time.perf_counter() - started_s) * 1e3, str(answer["mode"])


def bystander(fleet: Fleet, round_: int, tokens: int) -> dict[str, float]:
    """Return the bystander's longest pause, in ms, by who computes the prompt."""
    found = {}
    for number, way in enumerate(("here", "at P")):
        prompt = text(tokens, seed=50_000 + 10 * round_ + number)
        name = SessionId(f"{round_:016x}{50 + number:016x}")
        told = {} if way == "here" else {"decode_from": address(fleet.p)}
        stream = Bystander(fleet.d)
        stream.wait_for(20)
        since_s = time.perf_counter()
        _, mode = timed(fleet.d, prompt, name, **told)
        stream.wait_for(len(stream.at_s) + 5)
        stream.stop()
        assert (mode == "remote_prefill") == (way == "at P"), (way, mode)
        found[way] = stream.longest_pause_ms(since_s)
    return found


def crossed(fleet: Fleet, round_: int, tokens: int, *, added: int) -> dict[str, float]:
    """Return KV bytes and TTFT of a turn by how its prompt came to be there."""
    found = dict[str, float]()
    for number, way in enumerate(("append", "delta", "full", "fetch", "cold")):
        name = SessionId(f"{round_:016x}{number:016x}")
        prompt = text(tokens, seed=1000 * round_ + number)
        said = fleet.d.serve(prompt, name)
        longer = [*prompt, *said["tokens"], *text(added, seed=number)]
        worker = fleet.d if way in ("append", "delta") else fleet.other
        told: dict[str, Any] = {}
        if way in ("delta", "full"):
            told = {"decode_from": address(fleet.p)}
        elif way == "fetch":
            told = {"bring_from": address(fleet.d)}
        before = worker.metric("ownerserve_brought_bytes_total")
        ms, mode = timed(worker, longer, name, **told)
        found[f"{way} ms"] = ms
        found[f"{way} bytes"] = worker.metric("ownerserve_brought_bytes_total") - before
        expected = {"delta": "remote_prefill", "full": "remote_prefill", "append": "direct_append"}
        assert mode == expected.get(way, mode), (way, mode)
    return found


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--added", type=int, default=1500)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            for round_ in track(range(options.rounds), console=Console(stderr=True)):
                for way, ms in bystander(fleet, round_, options.tokens).items():
                    found.setdefault(f"pause {way}", []).append(ms)
                crossing = crossed(fleet, round_, options.tokens, added=options.added)
                for way, value in crossing.items():
                    found.setdefault(way, []).append(value)
            early = fleet.d.metric('ownerserve_ordered_bytes_total{when="early"}')
            behind = fleet.d.metric('ownerserve_ordered_bytes_total{when="behind"}')
        finally:
            fleet.close()
    report("pd_bench", rows(found, options, early / (early + behind)))


def rows(found: dict[str, list[float]], options: argparse.Namespace, early: float) -> list[Row]:
    """Return what is reported."""
    middle = {way: median(values) for way, values in found.items()}
    turn = f"{options.added} tokens behind {options.tokens}"
    table = [
        smaller_is_better(
            f"a bystander's longest pause while {options.tokens} tokens are computed at P",
            "ms",
            middle["pause at P"],
            other=middle["pause here"],
            other_name="computed beside it",
        ),
        larger_is_better(
            "bytes read before P was done, of all that were read",
            "share",
            early,
            other=0.9,
            other_name="goal",
            goal=">= 0.9",
        ),
        smaller_is_better(
            f"KV bytes that cross for {turn}: D keeps the session",
            "bytes",
            middle["delta bytes"],
            other=middle["full bytes"],
            other_name="the full prompt",
        ),
    ]
    table += [
        smaller_is_better(
            f"TTFT of {turn}: {told}",
            "ms",
            middle[f"{way} ms"],
            other=middle["cold ms"],
            other_name="computed anew",
        )
        for way, told in (
            ("append", "append at its owner"),
            ("delta", "computed at P, read by its owner"),
            ("fetch", "its state read from its owner"),
        )
    ]
    return table


if __name__ == "__main__":
    main()
