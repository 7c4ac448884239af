"""Soak a fleet of real processes: agents, and faults drawn from a seed; exit status 1 when anything
is wrong at the end.

    python tools/soak.py [--minutes 10] [--seed 1] [--json PATH|-]

A gateway, two workers of the reference engine with stores and a directory serve agents whose every
answer is compared with that of a worker without faults. One of them is killed, restarted or stood
still every few seconds. Memory, descriptors, threads, disk and tables must stay flat; at the end no
request may be missing, no state machine's check have failed, every store verify. Ended early, by
SIGINT, SIGTERM or SIGKILL, it leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for `tests.support`

from tests.support.soak.soak import soak  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a fleet of real processes.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of faults and conversations")
    parser.add_argument("--json", metavar="PATH|-", help="the result as one JSON object")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soaked = soak(Path(folder), given.minutes * 60, seed=given.seed, tell=say)
    result = json.dumps(soaked.as_json(given.seed), indent=2)
    if given.json == "-":
        print(result)
    elif given.json:
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(result + "\n")
    say(f"{soaked.turns['answered']} turns, {soaked.faults.total()} faults")
    for failure in soaked.failures:
        say(f"FAILED: {failure}")
    say("failed" if soaked.failures else "all held, all flat")
    return 1 if soaked.failures else 0


def say(line: str) -> None:
    """A line of progress, on standard error: standard output is the result's."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
