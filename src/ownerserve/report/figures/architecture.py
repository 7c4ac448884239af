"""This module draws figure 5: router with its session table, symmetric workers, and the path of a
migration."""

from __future__ import annotations

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ownerserve.report.figures.style import BLUE, GREEN, INK, VERMILLION, canvas

MOST_WORKERS = 4


class Architecture(msgspec.Struct, frozen=True):
    """The data of figure 5 is what its boxes show.

    `sessions`: what the router's table shows, session -> worker. `migration`: source, target and
    the session that moves. At most four workers are drawn, the last standing for the rest.
    """

    workers: list[str]
    sessions: dict[str, str]
    migration: tuple[str, str, str]
    parts: tuple[str, ...] = ("HeteroCache", "engine: P and D", "store: host, SSD")


def architecture(data: Architecture) -> Figure:
    """Draw boxes and arrows on a plane of 100 x 62."""
    figure = canvas(5.6)
    axes = figure.add_subplot()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 62)
    axes.axis("off")
    _box(axes, (2, 44), (15, 10), "agents\n(turns)", INK)
    _box(axes, (27, 38), (46, 22), "", VERMILLION)
    axes.text(29, 57, "router: EAR + cost of a way", va="center", weight="bold")
    for at, (session, worker) in enumerate(list(data.sessions.items())[:4]):
        axes.text(30, 53 - 3.6 * at, f"{session}  →  {worker}", va="center", family="monospace")
    axes.text(
        52, 46.5, "pending prefill > T_hot,\nno move for T_cool:\nleast loaded with room",
        va="center", fontsize=8.5,
    )  # fmt: skip
    _box(axes, (82, 44), (16, 10), "directory\n(owner, epoch)", GREEN)
    _arrow(axes, (17, 49), (27, 49), INK)
    _arrow(axes, (73, 49), (82, 49), GREEN)
    shown = data.workers[:MOST_WORKERS]
    step = 96 / len(shown)
    width, tops = step - 4, {}
    for at, worker in enumerate(shown):
        left = 2 + at * step + 2
        _box(axes, (left, 3), (width, 21), "", BLUE)
        axes.text(left + width / 2, 21.5, worker, ha="center", va="center", weight="bold")
        axes.text(
            left + width / 2, 11.5, "\n".join(data.parts), ha="center", va="center",
            fontsize=8.5, linespacing=1.7,
        )  # fmt: skip
        tops[worker] = (left + width / 2, 24.0)
        _arrow(axes, (50, 38), tops[worker], INK)
    source, target, session = data.migration
    if source in tops and target in tops:
        (x0, y), (x1, _) = tops[source], tops[target]
        axes.add_patch(
            FancyArrowPatch(
                (x0, y),
                (x1, y),
                arrowstyle="-|>",
                mutation_scale=14,
                color=VERMILLION,
                linestyle="--",
                linewidth=2,
                connectionstyle=f"arc3,rad={-0.3 if x1 > x0 else 0.3}",
            )
        )
        axes.text(
            (x0 + x1) / 2, y + 6.5, f"{session} moves", ha="center", color=VERMILLION,
            weight="bold", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    return figure


def _box(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, colour: str
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            corner,
            *size,
            boxstyle="round,pad=0,rounding_size=1.2",
            facecolor="none",
            edgecolor=colour,
            linewidth=1.8,
        )
    )
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1)
    )
