"""Size ratchet: code may shrink, not sprawl.

Limits are style.md §15: a function about 60 lines, a class about 12 public methods, a constructor
about 6 parameters. What stands above a limit is named in EXCEPTIONS with its present size and the
reason; it may shrink from there, never grow. A file is looked at from about 500 lines and never
cut for its length alone: it is printed, and that is all.

    python tools/ratchet.py        exit 1 and one line for each violation
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREES = ("src", "tests", "benchmarks", "tools")
LIMITS = {"function": 60, "class": 12, "constructor": 6}
WARNED_FILE = 500

# "kind path[:name]" -> (size allowed, reason)
EXCEPTIONS: dict[str, tuple[int, str]] = {
    "class src/ownerserve/engines/vllm/connector.py:OwnerServeConnector": (
        29,
        "vLLM's interface: a method for each of its hooks, each one call",
    ),
    "class src/ownerserve/engines/vllm/scheduler_side/free_order.py:FreeOrder": (
        18,
        "vLLM's interface of a queue is eight of them; the rest is what soft references ask",
    ),
    "class src/ownerserve/engines/hf/engine/commands.py:AsyncEngine": (
        13,
        "what threads beside the engine's ask of it: a command each, and what may be read at once",
    ),
    "class src/ownerserve/router/fleet.py:Candidates": (
        13,
        "what policies ask of the workers, a look-up each, and the three by which the fleet keeps"
        " them",
    ),
    "class src/ownerserve/store/tiers/memory.py:MemoryTier": (
        13,
        "the tier port's eleven, and how what lies in host memory is found and held",
    ),
    "class src/ownerserve/store/tiers/tiered.py:TieredStore": (
        13,
        "the tier port's eleven, what copies move, and what is held in the fastest tier",
    ),
    "class src/ownerserve/store/disk/tier.py:DiskCore": (
        13,
        "what every part of the disk tier shares: locks, health and the index, a line each",
    ),
}


class Size(NamedTuple):
    kind: str
    where: str
    size: int


def measure(path: Path) -> Iterator[Size]:
    """Every measured thing in one file."""
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    yield Size("file", name, len(text.splitlines()))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Size("function", f"{name}:{node.name}", lines)
            if node.name == "__init__":
                parameters = len(node.args.args) + len(node.args.kwonlyargs) - 1
                yield Size("constructor", f"{name}:{node.lineno}", parameters)
        elif isinstance(node, ast.ClassDef) and name.startswith("src/"):
            public = [
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                and not item.name.startswith("_")
            ]
            yield Size("class", f"{name}:{node.name}", len(public))


def main() -> int:
    violations = []
    long_files = []
    used = set()
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            for kind, where, size in measure(path):
                if kind == "file":
                    if size > WARNED_FILE:
                        long_files.append(f"a long file: {where}, {size} lines")
                    continue
                key = f"{kind} {where}"
                limit = LIMITS[kind]
                if key in EXCEPTIONS:
                    used.add(key)
                    limit = EXCEPTIONS[key][0]
                    if size < limit:
                        violations.append(f"{key}: now {size}; lower its exception from {limit}")
                if size > limit:
                    violations.append(f"{key}: {size} > {limit}")
    violations += [f"{key}: exception no longer needed" for key in EXCEPTIONS.keys() - used]
    print("\n".join([*long_files, *(violations or ["sizes: ok"])]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
