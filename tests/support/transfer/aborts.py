"""Reads cut off at random points between real processes, as many as are asked for, by each mover.

    python -m tests.support.transfer.aborts mooncake nixl --aborts 10000

An engine's mover runs in the engine's own environment (make test-engines makes them). A line for
every storm (storm.py), and one for each road; exit 1 for late bytes, wrong bytes that count, or
whatever is left behind.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.children import ROOT, importing
from tests.support.transfer.engines.environments import SETTINGS, packages_of
from tests.support.transfer.lending import road_at
from tests.support.transfer.storm import Came, storm

ENGINES = "tests.support.transfer.engines"
PATHS = {
    "readv": "tests.support.transfer.roads:READV",
    "shm": "tests.support.transfer.roads:SHM",
    "tcp": "tests.support.transfer.tcp_road:TCP",
    "mooncake": f"{ENGINES}.mooncake_road:MOONCAKE",
    "nixl": f"{ENGINES}.nixl_road:NIXL",
}
TRIALS = 500
"""Of one storm: each has one to three reads, and leaves what it abandoned."""


def aborts(name: str, *, least: int, seed: int) -> Came:
    """Make storms by that road until so many reads were cut off."""
    road, total, begun_s = road_at(PATHS[name]), Came(), time.monotonic()
    while total.aborted < least:
        trials = min(TRIALS, max(20, (least - total.aborted) * 2 // 3))
        came = storm(road, trials=trials, seed=seed)
        total.landed += came.landed
        total.counted += came.counted
        total.aborted += came.aborted
        total.late += came.late
        total.failed += came.failed
        total.by += came.by
        seed += 1
        print(f"{name}: {total.aborted} of {least}, {time.monotonic() - begun_s:.0f} s", flush=True)
    return total


def told(name: str, came: Came) -> str:
    """What came of a road's aborts, in a line."""
    failed = ", ".join(f"{why} {count}" for why, count in sorted(came.failed.items()))
    trials = ", ".join(f"{how} {count}" for how, count in sorted(came.by.items()))
    return (
        f"{name}: {came.aborted} cut off, in trials by {trials}; {came.landed} landed,"
        f" {came.counted} counted; {failed}; {came.late} bytes late beside what is abandoned"
    )


def there(name: str, least: int, seed: int) -> int:
    """Do the same in the engine's environment; returns its exit code."""
    if packages_of(name) is None:
        print(f"{name}: needs its environment: make test-engines", file=sys.stderr)
        return 2
    numbers = ("--aborts", str(least), "--seed", str(seed))
    command = [ROOT / f".venv-{name}" / "bin" / "python", "-m", __spec__.name, name, *numbers]
    env = importing(**SETTINGS[name])
    return subprocess.run(command, env=env, cwd=ROOT, check=False).returncode


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roads", nargs="*", metavar="ROAD", help=", ".join(PATHS))
    parser.add_argument("--aborts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    if unknown := set(asked.roads) - PATHS.keys():
        parser.error(f"{min(unknown)} is none of {', '.join(PATHS)}")
    code = 0
    for name in asked.roads or PATHS:
        if name in SETTINGS and Path(sys.prefix) != ROOT / f".venv-{name}":
            code = max(code, there(name, asked.aborts, asked.seed))
            continue
        came = aborts(name, least=asked.aborts, seed=asked.seed)
        print(told(name, came), flush=True)
        code = max(code, int(came.late > 0))
    return code


if __name__ == "__main__":
    sys.exit(main())
