"""CPU of the connector's hooks on vLLM's scheduler thread: sessions of 100k tokens, blocks of 16.

    python benchmarks/vllm_hooks.py

Runs benchmarks/vllm/scheduler_hooks.py, which says what is played, in vLLM's own environment. Hooks
are judged by their largest and their median call, with and without the garbage collections of
Python that fall into them; what vLLM's own calls take stands beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from result import Row, report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"
JUDGED = ("arrived", "matched", "finished")


def main() -> None:
    if not PYTHON.exists():
        sys.exit(f"no vLLM at {PYTHON}: make bench-envs")
    played = subprocess.run(
        [PYTHON, HERE / "vllm/scheduler_hooks.py", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(played.stdout.strip().splitlines()[-1])
    rows = [
        Row(f"{part}: {name}, {what}", "ms CPU", value, goal="<= 1" if name in JUDGED else "")
        for part, hooks in found["hooks"].items()
        for name, (_, middle, most, _, own) in sorted(hooks.items())
        for what, value in (
            ("median", middle),
            ("largest", most),
            ("largest, without garbage collection", own),
        )
    ]
    report("vllm_hooks", rows, others={"vllm": found["vllm"]})


if __name__ == "__main__":
    main()
