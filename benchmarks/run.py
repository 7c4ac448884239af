"""Runs every benchmark, one after another; each writes benchmarks/results/NAME.json.

    python benchmarks/run.py [NAME ...]

A benchmark is a script of this folder with a `main`. One that needs an environment or a tool that
is not there fails and is named at the end; the others run all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NO_BENCHMARKS = {"run", "result", "store_rivals"}


def names() -> list[str]:
    """Every benchmark's name."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_BENCHMARKS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    chosen = parser.parse_args().names or names()
    unknown = set(chosen) - set(names())
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    failed = [
        name
        for name in chosen
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
