"""Our package as `pip install` leaves it, as far as vLLM's plug-ins look."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.support.children import ROOT


def distribution(folder: Path) -> Path:
    """What `pip install ownerserve` leaves behind of entry points; the folder to look in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"ownerserve-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: ownerserve\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder
