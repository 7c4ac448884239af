"""Power cuts by the hundred thousand: lives of a store recorded, the states that a cut may leave
rebuilt, each opened by the real classes. docs/evidence/power-loss.md says what was seen.

    python tools/power_loss.py --seeds 30 --states 100000 --json power-loss.json

A seed is lives of its own: about 1,100 calls, two of three lives ended by kill -9. The states are
shared out among the seeds and the two models of a file system. Exit 1 when anything was broken.
Needs strace.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.progress import Progress

from tests.support.power.campaign import draw, run
from tests.support.power.recording import record

KEPT = 20


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=30, help="how many lives to record (30)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--states", type=int, default=100_000, help="of all seeds (100000)")
    parser.add_argument("--record", type=Path, help="folder on a real file system (a temporary)")
    parser.add_argument("--scratch", type=Path, help="folder for the states (/dev/shm)")
    parser.add_argument("--json", type=Path, help="write the figures here, after every seed")
    return parser.parse_args()


def main() -> int:
    """Run the campaign; returns the exit status."""
    asked = options()
    logging.disable(logging.CRITICAL)  # a store speaks of each record that a cut has torn
    memory = Path("/dev/shm")
    scratch = asked.scratch or (memory if memory.is_dir() else None)
    rows: list[dict[str, object]] = []
    findings: list[dict[str, object]] = []
    kinds: Counter[str] = Counter()
    with Progress() as bar:
        task = bar.add_task("states", total=asked.states)
        for seed in range(asked.first, asked.first + asked.seeds):
            begun_s = time.process_time()
            with (
                tempfile.TemporaryDirectory(dir=asked.record, prefix="power-") as life,
                tempfile.TemporaryDirectory(dir=scratch, prefix="power-") as states,
            ):
                recording = record(seed, Path(life))
                cases = draw(recording, f"seed {seed}", asked.states // asked.seeds)
                tally = run(cases, Path(states), random.Random(seed))
            bar.advance(task, tally.states)
            kinds += tally.kinds()
            cpu_s = time.process_time() - begun_s
            rows.append(
                {
                    "seed": seed,
                    "events": len(recording.events),
                    "kills": recording.kills,
                    "states": tally.states,
                    "cuts": tally.cuts,
                    "broken": len(tally.findings),
                    "cpu_s": round(cpu_s, 1),
                }
            )
            findings += [{"seed": seed} | found._asdict() for found in tally.findings[:KEPT]]
            if asked.json:
                asked.json.write_text(json.dumps(summary(rows, kinds, findings), indent=1))
    print(json.dumps(summary(rows, kinds, []), indent=1))
    return int(bool(kinds))


def summary(
    rows: list[dict[str, object]], kinds: Counter[str], findings: list[dict[str, object]]
) -> dict[str, object]:
    """Return the report: totals, one row a seed, and the first states that broke something."""
    totals = {
        key: sum(row[key] for row in rows)  # type: ignore[misc]
        for key in ("events", "kills", "states", "cuts", "broken", "cpu_s")
    }
    return {
        "schema": "ownerserve.power_loss/1",
        "seeds": len(rows),
        **totals,
        "kinds": {
            kind: kinds[kind] for kind in ("wrong", "lost", "returned", "unopened", "orphan")
        },
        "rows": rows,
        "findings": findings,
    }


if __name__ == "__main__":
    sys.exit(main())
