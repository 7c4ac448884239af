"""How far the code is from "one name, one place": the anchors of docs/evidence/anchors.md.

| anchor | counts |
|---|---|
| names | public class names in src, and the share of them that is defined twice or more |
| folders | modules in the biggest folder, and every folder above FOLDER_MODULES |
| docstrings | those in src that begin with a word of OPENERS |
| turn | files that a warm turn passes in a gateway and a worker (tools/turn_path.py): `--turn` |
| core | CPU seconds of what `make test-core` runs: `--core` |

    python tools/anchors.py [FOLDER] [--turn] [--core] [--json] [--lists DIR]

FOLDER is the checkout to measure (default: this one). `--lists` writes turn_path.txt, twice.txt and
openers.txt, a line for each thing that was counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from names import OPENERS, class_definitions, docstrings, modules
from turn_path import TurnPath
from turn_path import measure as measure_turn

ROOT = Path(__file__).resolve().parent.parent
FOLDER_MODULES = 16


def folder_sizes(source: Path) -> dict[str, int]:
    """Folder -> its modules, `__init__.py` among them."""
    sizes: dict[str, int] = defaultdict(int)
    for path in source.rglob("*.py"):
        sizes[path.parent.relative_to(source).as_posix()] += 1
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def core_cpu_s(checkout: Path) -> float:
    """CPU seconds of `make test-core`'s command. Raises CalledProcessError when a test fails."""
    recipe = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--assume-old=.venv/.setup", "test-core"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace("\\\n", " ")
    [command] = [line for line in recipe.splitlines() if " -m pytest" in line]
    arguments = shlex.split(command)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments[1:], "-q"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        stdout=sys.stderr,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def static(source: Path) -> dict[str, Any]:
    """What can be counted without running anything."""
    trees = list(modules(source))
    classes = class_definitions(trees)
    twice = {name: where for name, where in classes.items() if len(where) > 1}
    texts = list(docstrings(trees))
    opening = [text for text in texts if text.opens_badly]
    sizes = folder_sizes(source)
    return {
        "class_names": len(classes),
        "class_names_twice": len(twice),
        "class_names_twice_share": round(len(twice) / len(classes), 4),
        "biggest_folder": next(iter(sizes)),
        "biggest_folder_modules": next(iter(sizes.values())),
        "folders_above": {name: size for name, size in sizes.items() if size > FOLDER_MODULES},
        "docstrings": len(texts),
        "docstrings_opening_badly": len(opening),
        "files": sum(sizes.values()),
        "twice": twice,
        "openers": {text.where: text.text.split("\n")[0] for text in opening},
    }


def write_lists(folder: Path, report: dict[str, Any], source: Path, turn: TurnPath | None) -> None:
    """Write one list for each anchor that was counted."""
    folder.mkdir(parents=True, exist_ok=True)
    twice = [f"{len(where)} {name} {' '.join(where)}" for name, where in report["twice"].items()]
    (folder / "twice.txt").write_text("\n".join(sorted(twice, reverse=True)) + "\n")
    openers = [f"{where} {text}" for where, text in report["openers"].items()]
    (folder / "openers.txt").write_text("\n".join(openers) + "\n")
    if turn is not None:
        sizes = [(len((source / file).read_text().splitlines()), file) for file in turn.files]
        lines = [f"{size:5d} {file}" for size, file in sizes]
        (folder / "turn_path.txt").write_text("\n".join(lines) + "\n")


def table(report: dict[str, Any]) -> str:
    """The anchors as a table of Markdown."""
    share = f"{report['class_names_twice_share']:.1%}"
    above = ", ".join(f"{name} {size}" for name, size in report["folders_above"].items())
    rows = [
        (
            "public class names defined twice",
            f"{report['class_names_twice']} of {report['class_names']} ({share})",
        ),
        ("biggest folder", f"{report['biggest_folder']}, {report['biggest_folder_modules']}"),
        (f"folders above {FOLDER_MODULES} modules", above or "none"),
        (
            f"docstrings that open with {', '.join(OPENERS)}",
            f"{report['docstrings_opening_badly']} of {report['docstrings']}",
        ),
    ]
    if "turn_files" in report:
        rows += [
            ("files a warm turn passes", f"{report['turn_files']} of {report['files']}"),
            ("record types it passes between files", str(report["turn_records"])),
        ]
    if "core_cpu_s" in report:
        rows.append(("core suite, CPU s", f"{report['core_cpu_s']:.0f}"))
    return "\n".join(
        ["| anchor | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--turn", action="store_true", help="run a fleet too (30 s)")
    parser.add_argument("--core", action="store_true", help="run the core suite too (minutes)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--lists", type=Path, metavar="DIR", help="write the lists there")
    chosen = parser.parse_args(arguments)
    checkout = chosen.folder.resolve()
    source = checkout / "src" / "ownerserve"
    report = static(source)
    turn = measure_turn(checkout) if chosen.turn else None
    if turn is not None:
        report |= {"turn_files": len(turn.files), "turn_records": len(turn.records)}
        report |= {"turn_path": turn.files, "turn_record_types": turn.records}
    if chosen.core:
        report["core_cpu_s"] = round(core_cpu_s(checkout), 1)
    if chosen.lists is not None:
        write_lists(chosen.lists, report, source, turn)
    print(json.dumps(report, indent=2) if chosen.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
