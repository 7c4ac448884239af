"""This module draws what a session's state is made of, by model, and how many sessions fit in how
much memory."""

from __future__ import annotations

import msgspec
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ownerserve.kv.units import format_bytes
from ownerserve.report.figures.style import CYCLE, GRID, HATCHES, canvas, looks

GIB = float(1 << 30)


class StateBreakdown(msgspec.Struct, frozen=True):
    """The data of the breakdown is bytes of one session at `context_tokens`.

    `models`: model -> component -> bytes. `dense`: model -> bytes of the same in a dense layout
    (every layer an entry a token).
    """

    context_tokens: int
    models: dict[str, dict[str, int]]
    dense: dict[str, int] = {}


def state_breakdown(data: StateBreakdown) -> Figure:
    """Draw stacked bars, largest model first; the total, and what a dense layout takes, stand
    beside each."""
    models = sorted(data.models, key=lambda name: -sum(data.models[name].values()))
    components = list(dict.fromkeys(part for name in models for part in data.models[name]))
    figure = canvas(1.4 + 0.42 * len(models))
    axes = figure.add_subplot()
    left = np.zeros(len(models))
    for index, component in enumerate(components):
        sizes = np.array([data.models[name].get(component, 0) for name in models]) / GIB
        axes.barh(
            models, sizes, left=left, height=0.66, label=component, edgecolor="white",
            color=CYCLE[index % len(CYCLE)], hatch=HATCHES[index % len(HATCHES)],
        )  # fmt: skip
        left += sizes
    for at, name in enumerate(models):
        total = sum(data.models[name].values())
        dense = data.dense.get(name)
        text = format_bytes(total)
        if dense and dense > total:
            text += f"  (dense: {dense / total:.3g} times as much)"
        axes.annotate(
            text, (left[at], at), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=8.5,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, float(left.max(initial=0)) * 1.45 or 1)
    axes.set_xlabel("GiB a session")
    axes.set_title(f"State of one session at {data.context_tokens:,} tokens")
    axes.legend(loc="lower right", ncols=2)
    return figure


class SessionsByMemory(msgspec.Struct, frozen=True):
    """The data of the lines has, for each name (a model, or a layout of it), the sessions that fit
    at each of `hbm_bytes`."""

    context_tokens: int
    hbm_bytes: list[int]
    lines: dict[str, list[float]]


def sessions_by_memory(data: SessionsByMemory) -> Figure:
    """Draw the lines, logarithmic both ways: a layout that takes a tenth is a parallel line, ten
    times higher."""
    figure = canvas(4.6)
    axes = figure.add_subplot()
    sizes = [size / GIB for size in data.hbm_bytes]
    for name, look in looks(list(data.lines)).items():
        axes.plot(sizes, data.lines[name], label=name, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(which="minor", axis="y", color=GRID, linewidth=0.3)
    axes.set_xlabel("memory for state, GiB")
    axes.set_ylabel("sessions")
    axes.set_title(f"Sessions of {data.context_tokens:,} tokens that fit")
    axes.legend()
    return figure
