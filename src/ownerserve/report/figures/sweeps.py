"""This module draws curves over a swept setting: figure 9's small multiples, and seed 003's
capacity cliff."""

from __future__ import annotations

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ownerserve.report.figures.style import INK, grid_of, looks


class Sweep(msgspec.Struct, frozen=True):
    """A sweep is one setting and the metric over it.

    `lines`: name -> a number for each of `x`, None where the run told none. `scale`: "linear" or
    "log" (of x). `chosen`: the value that is the default.
    """

    title: str
    x_label: str
    y_label: str
    x: list[float]
    lines: dict[str, list[float | None]]
    scale: str = "linear"
    chosen: float | None = None


class Sweeps(msgspec.Struct, frozen=True):
    title: str
    sweeps: list[Sweep]
    columns: int = 3


def sweeps(data: Sweeps) -> Figure:
    """Draw a panel a sweep; a name has one colour and marker on all of them, and one legend."""
    columns = min(data.columns, len(data.sweeps))
    figure, axes = grid_of(
        len(data.sweeps), columns=columns, height_in=2.7 if len(data.sweeps) > columns else 3.6
    )
    figure.suptitle(data.title)
    names = list(dict.fromkeys(name for sweep in data.sweeps for name in sweep.lines))
    handles = {}
    for axis, sweep in zip(axes, data.sweeps, strict=True):
        for name, look in looks(names).items():
            if name in sweep.lines:
                points = [float("nan") if y is None else y for y in sweep.lines[name]]
                handles[name] = axis.plot(sweep.x, points, label=name, **look)[0]
        _dress(axis, sweep)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=5)
    return figure


def _dress(axis: Axes, sweep: Sweep) -> None:
    axis.set_title(sweep.title)
    axis.set_xlabel(sweep.x_label)
    axis.set_ylabel(sweep.y_label)
    axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])  # so that a marker at 0 is whole
    if sweep.scale == "log":
        axis.set_xscale("log")
        axis.set_xticks(sweep.x, [f"{x:g}" for x in sweep.x])
        axis.minorticks_off()
    if sweep.chosen is not None:
        axis.axvline(sweep.chosen, color=INK, linestyle=":", linewidth=1)
