"""How long a client waits whose turn moves to another worker amid its answer, between real hf
workers behind a gateway: its state brought before the turn is stopped, beside all of it after.

    python benchmarks/moves_bench.py [--rounds 7] [--tokens 1024 8192 16384]

Three workers of tiny-qwen3 as processes, forked from this one, a thread each, a hundredth of a
second more a step: a source, and two that it is drained to in turn, of which one brings nothing
before. Both take the same prompts. The machine's other work counts: compare within a run.

pause       the longest time between two events of the client's stream from the drain on
before it   the longest until then, with nothing but the answer under way
bytes       state that came before the stop, of all that came
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import httpx
import torch
import transformers  # noqa: F401 - workers are forks of this process
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from result import Row, report
from tests.support.hf.engine_rig import text
from tests.support.metric_lines import summed
from tests.support.waits import until

PRICED = "tests.support.hf.assumed"
KEPT = ("--host-cache", "1GiB", "--kv-memory", "1GiB", "--dear", "--slow-steps")
WAYS = {"before the stop": (), "after the stop": ("--state-after",)}
TOKENS = 240
DRAINS_AFTER = 60
"""Events of a stream, of which a token each has one."""
WAIT_S = 900.0
ASKS_EVERY_S = 0.5
FORK = multiprocessing.get_context("fork")
"""A worker takes seconds of CPU to import torch; forked it takes none."""


class Moved(NamedTuple):
    """What the client of one move saw, in ms, and the bytes that its target read."""

    pause_ms: float
    undisturbed_ms: float
    ahead_bytes: float
    bytes: float


class Member:
    """`ownerserve GIVEN...`, run as `module`, as a fork of this process."""

    def __init__(self, folder: Path, name: str, given: Sequence[str], *, module: str) -> None:
        self._ready = folder / f"{name}.ready"
        args = ([*given, "--ready-file", str(self._ready)], module, folder / f"{name}.log")
        self._process = FORK.Process(target=_run, args=args)
        self._process.start()

    def serves(self) -> list[str]:
        """Return where it serves, once it does."""
        until(self._ready.exists, within_s=WAIT_S, what=f"{self._ready.stem} serves")
        return self._ready.read_text().split()

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def _run(given: list[str], module: str, log: Path) -> None:
    torch.set_num_threads(1)
    with log.open("w") as said, redirect_stdout(said), redirect_stderr(said):
        sys.argv = ["ownerserve", *given]
        runpy.run_module(module, run_name="__main__")


class Worker:
    """A worker that serves at `url`."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, url.removeprefix("http://")

    def metric(self, start: str) -> float:
        """The sum of a metric of its, which may be named with its first labels."""
        return summed(httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text, start)


class Client:
    """It reads a stream of TOKENS tokens: when each of its events came, and whether it moved."""

    def __init__(self, url: str, prompt: list[int], session: str) -> None:
        self.at_s: list[float] = []
        self._has_moved = False
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        # A session of one turn: none stands idle at a drained worker, to be moved meanwhile.
        headers = {"x-session-id": session, "x-ownerserve-session-final": "true"}
        self._asked = (url, {**body, "stream": True}, headers)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url, body, headers = self._asked
        while not self.at_s:  # a busy worker that is late for its probe has its turn refused
            with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.at_s.append(time.perf_counter())
                    elif line.startswith(":") and "x-ownerserve-reason: moved" in line:
                        self._has_moved = True
            time.sleep(0.0 if self.at_s else ASKS_EVERY_S)

    def wait_for(self, events: int) -> None:
        """Return once it has read so many."""
        until(lambda: len(self.at_s) >= events, within_s=WAIT_S, what=f"{events} events")

    def wait(self) -> None:
        """Return once it has read all, over a move."""
        self._thread.join(WAIT_S)
        assert self._has_moved and len(self.at_s) >= TOKENS, (len(self.at_s), self._has_moved)


class Fleet:
    """A gateway, a source and a target by each way."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        def begun(name: str, *given: str, module: str) -> Member:
            member = Member(folder, name, given, module=module)
            stack.callback(member.stop)
            return member

        flags = {"source": (), **WAYS}
        begin = [
            begun(
                f"w{n}", "worker", "--model", "tiny-qwen3", "--port", "0", "--rpc-port", "0",
                "--worker-id", f"w{n}", "--threads", "1", *KEPT, *more, module=PRICED,
            )
            for n, more in enumerate(flags.values())
        ]  # fmt: skip
        workers = [Worker(*one.serves()) for one in begin]
        self.source, self.targets = workers[0], dict(zip(WAYS, workers[1:], strict=True))
        over = [word for one in workers for word in ("--worker", one.url)]
        ports = ("--port", "0", "--admin-port", "0", "--receipts", "open")
        gateway = begun("gateway", "gateway", *ports, *over, module="ownerserve.cli.main")
        self.data_url, self._admin_url = gateway.serves()
        for worker in workers:
            until(lambda worker=worker: self._is_up(worker), within_s=WAIT_S, what="all are up")

    def tell(self, worker: Worker, what: str) -> None:
        """Drain or undrain a worker, and wait until it is known."""
        httpx.post(f"{self._admin_url}/workers/{worker.name}/{what}", timeout=WAIT_S)
        if what == "undrain":
            until(lambda: self._is_up(worker), within_s=WAIT_S, what=f"{worker.name} is up")

    def _is_up(self, worker: Worker) -> bool:
        told = httpx.get(f"{self._admin_url}/workers", timeout=WAIT_S).json()["workers"]
        return any(one["url"] == worker.url and one["up"] for one in told)

    def move(self, way: str, prompt: list[int], session: str) -> Moved:
        """Have a turn of the prompt move from the source that way."""
        target = self.targets[way]
        for one in self.targets.values():
            self.tell(one, "drain")
        counted = ("ownerserve_turn_state_bytes_total", "ownerserve_brought_bytes_total")
        before = [target.metric(name) for name in counted]
        client = Client(f"{self.data_url}/v1/completions", prompt, session)
        client.wait_for(DRAINS_AFTER)
        self.tell(target, "undrain")
        drained_s = time.perf_counter()
        self.tell(self.source, "drain")
        client.wait()
        self.tell(self.source, "undrain")
        ahead, came = (target.metric(name) - was for name, was in zip(counted, before, strict=True))
        gaps = [(b, (b - a) * 1e3) for a, b in pairwise(client.at_s)]
        return Moved(
            max(ms for at, ms in gaps if at > drained_s),
            max(ms for at, ms in gaps if at <= drained_s),
            ahead,
            came,
        )


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 16384])
    options = parser.parse_args()
    found: dict[tuple[int, str], list[Moved]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        fleet = Fleet(Path(folder), stack)
        rounds = [(n, tokens) for n in range(options.rounds) for tokens in options.tokens]
        told = Console(stderr=True)
        for number, tokens in track(rounds, console=told):
            prompt = text(tokens, seed=1000 * number + tokens)
            ways = list(WAYS)
            for way in ways if number % 2 else reversed(ways):
                moved = fleet.move(way, prompt, f"{number}-{tokens}-{way}")
                told.print(f"{tokens} tokens, state {way}: {moved}")
                found.setdefault((tokens, way), []).append(moved)
    report("moves_bench", [row for tokens in options.tokens for row in rows(found, tokens)])


def rows(found: dict[tuple[int, str], list[Moved]], tokens: int) -> list[Row]:
    """Return what is reported of moves at that length."""
    ours, other = (found[tokens, way] for way in WAYS)
    pauses, others = ([one.pause_ms for one in moves] for moves in (ours, other))
    calm = [one.undisturbed_ms for one in (*ours, *other)]
    total = sum(one.bytes for one in ours)
    mib = median(one.bytes for one in ours) / 2**20
    return [
        Row(
            f"client's longest pause, {tokens} tokens ({mib:.1f} MiB): state before the stop",
            "ms",
            median(pauses),
            median(others),
            "all of it after",
            median(others) / median(pauses),
            ours_span=middle(pauses),
            other_span=middle(others),
        ),
        Row(f"longest pause before it, {tokens} tokens", "ms", median(calm)),
        Row(
            f"bytes that came before the stop, {tokens} tokens",
            "share",
            sum(one.ahead_bytes for one in ours) / total if total else 0.0,
        ),
    ]


def middle(values: list[float]) -> tuple[float, float]:
    """Return the middle half of the values."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


if __name__ == "__main__":
    main()
