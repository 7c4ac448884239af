"""This module draws what bringing state back costs under each way of keeping it (full, zero,
periodic SWA, ...)."""

from __future__ import annotations

import msgspec
import numpy as np
from matplotlib.figure import Figure

from ownerserve.report.figures.style import BLUE, GREEN, VERMILLION, grid_of, horizontal_bars

PARTS = (("queue", GREEN, ".."), ("load", BLUE, ""), ("recompute", VERMILLION, "//"))


class Restored(msgspec.Struct, frozen=True):
    """This data has the means of one way a restored turn, and what was written to have it."""

    queue_ms: float
    load_ms: float
    recompute_ms: float
    ssd_written_bytes: float
    ssd_write_amplification: float | None


class RestorePolicies(msgspec.Struct, frozen=True):
    title: str
    policies: dict[str, Restored]


def restore_policies(data: RestorePolicies) -> Figure:
    """Draw two panels. Left: time in its three parts. Right: what the SSD was made to write for
    it."""
    names = list(data.policies)
    figure, (times, written) = grid_of(2, columns=2, height_in=1.5 + 0.34 * len(names))
    figure.suptitle(data.title)
    left = np.zeros(len(names))
    for part, colour, hatch in PARTS:
        spent = np.array([getattr(data.policies[name], f"{part}_ms") for name in names])
        times.barh(
            names, spent, left=left, color=colour, hatch=hatch, edgecolor="white", label=part,
            height=0.7,
        )  # fmt: skip
        left += spent
    times.invert_yaxis()
    times.grid(axis="y", visible=False)
    times.set_xlabel("ms a restored turn")
    times.set_title("Bringing state back")
    times.legend()
    horizontal_bars(written, {_labelled(n, data): _gigabytes(n, data) for n in names})
    written.set_xlabel("GB written to SSD   (x: write amplification)")
    written.set_title("What it cost to have it")
    return figure


def _gigabytes(name: str, data: RestorePolicies) -> float:
    return data.policies[name].ssd_written_bytes / 1e9


def _labelled(name: str, data: RestorePolicies) -> str:
    amplified = data.policies[name].ssd_write_amplification
    return name if amplified is None else f"{name}   x{amplified:.2f}"
