"""The gateway of one process beside that of two, in one run: CPU of all its processes a request.

    python benchmarks/relays_bench.py [--rounds 3]

Engines and load are router_bench's, in C. Each load is asked in two ways: each connection has one
session, as an agent's has, and each request of a connection is another session's, so that half of
them go to the other process. On two cores load, engines and gateway share them: throughput says
little, CPU a request says what more cores would give.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from router_bench import HERE, free_port

SECONDS, WARM_S, SESSIONS, ENGINES = 4, 1.5, 64, 4
OWN = 'int session = getenv("OWN_SESSION") ? c->fd % sessions : number % sessions;'
MIXED = "int session = number % sessions;"


class Shape(NamedTuple):
    """One kind of traffic: requests a second (0: without a pause), connections, bytes in, events
    out (0: one piece)."""

    name: str
    rate: int
    connections: int
    body_bytes: int
    events: int


SHAPES = (
    Shape("200 B", 800, 16, 200, 0),
    Shape("32 KB", 300, 16, 32 * 1024, 0),
    Shape("400 KB", 60, 16, 400_000, 0),
    Shape("turn", 20, 32, 400_000, 64),
    Shape("200 B, no pause", 0, 32, 200, 0),
)


def built(folder: Path) -> tuple[Path, Path]:
    """Load and engine; the load can keep to one session a connection."""
    source = (HERE / "router" / "load.c").read_text()
    assert MIXED in source
    (folder / "load.c").write_text(source.replace(MIXED, OWN))
    for name, path in (("load", folder / "load.c"), ("engine", HERE / "router" / "engine.c")):
        subprocess.run(["cc", "-O2", "-o", str(folder / name), str(path), "-lm"], check=True)
    return folder / "load", folder / "engine"


@contextmanager
def gateway(processes: int, workers: list[int], folder: Path) -> Iterator[tuple[list[int], str]]:
    """A gateway's process ids and its data port."""
    ready = folder / f"ready-{processes}"
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", "--log-level", "error"]
    command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
    command += ["--processes", str(processes)]
    command += [word for port in workers for word in ("--worker", f"http://127.0.0.1:{port}")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not ready.exists():
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        port = ready.read_text().split()[0].rpartition(":")[2]
        try:
            yield [process.pid, *map(int, children)], port
        finally:
            process.send_signal(signal.SIGTERM)


def cpu_ns(pids: list[int]) -> int:
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def measured(load: Path, pids: list[int], port: str, shape: Shape, own: str) -> Any:
    """CPU us a request, requests a second, and how many were lost."""
    words = [port, shape.rate, shape.connections, WARM_S, SECONDS, shape.body_bytes, shape.events]
    environment = {**os.environ, **({"OWN_SESSION": "1"} if own == "own" else {})}
    command = [str(load), *map(str, words), str(SESSIONS), "key"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, began_s = cpu_ns(pids), time.monotonic()
        process.stdout.readline()
        used_ns, took_s = cpu_ns(pids) - before, time.monotonic() - began_s
        said = json.loads(process.stdout.readline())
    return used_ns / 1000 / max(said["ok"], 1), said["ok"] / took_s, said["lost"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[tuple[str, str, int], list[Any]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        load, engine = built(folder)
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            words = [str(engine), str(port), "1", "5", "64", "line"]
            process = stack.enter_context(subprocess.Popen(words))
            stack.callback(process.kill)
        gateways = {n: stack.enter_context(gateway(n, ports, folder)) for n in (1, 2)}
        for _ in range(rounds):
            for shape in SHAPES:
                for own in ("own", "mixed"):
                    for processes, (pids, port) in gateways.items():
                        one = measured(load, pids, port, shape, own)
                        found.setdefault((shape.name, own, processes), []).append(one)
    for (name, own, processes), rows in found.items():
        cpu, rate, lost = zip(*rows, strict=True)
        print(
            f"{name:<16} {own:<6} N={processes}  {statistics.median(cpu):8.1f} us CPU"
            f"  {statistics.median(rate):7.0f}/s  lost {sum(lost)}"
        )


if __name__ == "__main__":
    main()
