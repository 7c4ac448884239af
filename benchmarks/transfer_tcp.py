"""The TCP mover beside plain gather sockets, Mooncake's TCP and NIXL's, on loopback.

    python benchmarks/transfer_tcp.py [--rounds N] [--only CONTENDER ...] [--shape NAME ...]

Each contender is a pair of processes, one that lends and one that reads (transfer/side.py), started
once. In each round each of them reads each shape once, in an order drawn anew; the others sleep.
Wall time is the reader's; CPU time is both processes'. A row's ratio is the median of the rounds'
ratios. One connection each. Contenders whose environment is not there are left out:
`make bench-transfer` makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from result import Row, report
from transfer.shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parents[1]
SIDE = Path(__file__).resolve().parent / "transfer" / "side.py"
OURS = ("told", "xxh3", "blake3")
FOREIGN = {
    "mooncake": (".venv-mooncake", "0.3.13.post1"),
    "nixl": (".venv-nixl", "1.5.1"),
}
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
"""Below .venv-mooncake/root: libibverbs, which Mooncake's wheel needs and does not bring."""
GOALS = {"plain": 0.8, "mooncake": 1.5, "nixl": 1.5}


class Took(NamedTuple):
    """What one read took: seconds of the wall, and of both processes' CPU."""

    wall_s: float
    cpu_s: float


class Pair:
    """A contender's two processes."""

    def __init__(self, contender: str) -> None:
        self._python = sys.executable
        if contender in FOREIGN:
            self._python = str(ROOT / FOREIGN[contender][0] / "bin" / "python")
        self._lender = self._start("lend", contender)
        (reached,) = self._told(self._lender, "reached")
        self._reader = self._start("read", contender, json.dumps(reached))
        self._told(self._reader, "reached")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        root = ROOT / ".venv-mooncake" / "root"
        settings = {**os.environ, "LD_LIBRARY_PATH": ":".join(str(root / at) for at in LIBRARIES)}
        return subprocess.Popen(
            [self._python, str(SIDE), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=settings,
        )  # fmt: skip

    def _told(self, process: subprocess.Popen[str], what: str) -> list[Any]:
        """The next line that is ours: engines print, too."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f'["{what}"'):
                return list(json.loads(line)[1:])
        raise RuntimeError(f"a side has ended: {process.args}")

    def _lenders_cpu_s(self) -> float:
        tasks = Path(f"/proc/{self._lender.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def read(self, shape: Shape) -> Took:
        assert self._reader.stdin is not None
        before_s = self._lenders_cpu_s()
        self._reader.stdin.write(f"{shape.name}\n")
        self._reader.stdin.flush()
        wall_s, cpu_s, is_right = self._told(self._reader, "took")
        assert is_right, "wrong bytes"
        return Took(wall_s, cpu_s + self._lenders_cpu_s() - before_s)

    def close(self) -> None:
        for process in (self._reader, self._lender):
            process.kill()
            process.wait()


Times = dict[tuple[str, str], list[Took]]
"""(contender, shape) -> what its reads took, a round each."""


def measure(contenders: list[str], shapes: list[Shape], rounds: int) -> Times:
    """Have all of them read all shapes, taking turns."""
    pairs = {name: Pair(name) for name in contenders}
    times: Times = defaultdict(list)
    draw = random.Random(1)
    try:
        for turn in range(rounds + 1):
            for shape in shapes:
                for name in draw.sample(contenders, len(contenders)):
                    took = pairs[name].read(shape)
                    if turn:  # the first warms up
                        times[name, shape.name].append(took)
    finally:
        for pair in pairs.values():
            pair.close()
    return times


def rows(times: Times, contenders: list[str], shapes: list[Shape]) -> list[Row]:
    """The table: each of ours beside each other, by wall and by CPU."""
    found = []
    for ours in (name for name in OURS if name in contenders):
        for other in (name for name in ("plain", *FOREIGN) if name in contenders):
            for kind in ("wall", "cpu"):
                goal = GOALS[other] if ours == "xxh3" and kind == "wall" else None
                found += [
                    row(times, shape, (ours, other), kind=kind, goal=goal) for shape in shapes
                ]
    return found


def row(
    times: Times, shape: Shape, names: tuple[str, str], *, kind: str, goal: float | None
) -> Row:
    """One comparison: GB/s of the wall, or GB of a CPU second."""
    ours, others = (
        [shape.bytes / 1e9 / getattr(took, f"{kind}_s") for took in times[name, shape.name]]
        for name in names
    )
    ratio = statistics.median(a / b for a, b in zip(ours, others, strict=True))
    return Row(
        f"tcp {names[0]}, {shape.name}, {kind}", "GB/s" if kind == "wall" else "GB/CPU s",
        statistics.median(ours), statistics.median(others), names[1], ratio,
        "" if goal is None else f">= {goal}",
    )  # fmt: skip


def main() -> None:
    """Measure and report."""
    there = [name for name, (venv, _) in FOREIGN.items() if (ROOT / venv).exists()]
    known = ["plain", *OURS, *there]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", choices=known)
    parser.add_argument("--shape", action="append", choices=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    contenders = options.only or known
    shapes = [shape for shape in SHAPES if not options.shape or shape.name in options.shape]
    times = measure(contenders, shapes, options.rounds)
    others = {name: FOREIGN[name][1] for name in there if name in contenders}
    report("transfer_tcp", rows(times, contenders, shapes), others=others)


if __name__ == "__main__":
    main()
