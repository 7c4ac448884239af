"""This module says how every figure looks, and writes it: PNG, SVG and the data behind it.

Owns colours, fonts and the writer. No pyplot: a figure is an object, nothing global is left behind.
Colours are Okabe and Ito's (told apart by all common kinds of colour blindness); what matters is
also told by a marker, a hatch or a label. Equal data give equal bytes: ids in an SVG are salted by
the figure's name, and no date or version is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK = "#26303a"
GRID = "#d3d8de"
MUTED = "#8a949e"
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
CYCLE = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#5B5B5B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "oo")

OURS = ("ownerserve", "ear")
BOUND = "oracle"
WIDTH_IN = 9.0
DPI = 144

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": DPI,
    "svg.fonttype": "path",
}

Draw: TypeAlias = Callable[[Any], Figure]


class Written(msgspec.Struct, frozen=True):
    """A written figure has three files; these are their paths."""

    png: Path
    svg: Path
    data: Path


def write(name: str, draw: Draw, data: msgspec.Struct, folder: Path) -> Written:
    """Draw `data` and write NAME.png, NAME.svg and NAME.json into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Written(*(folder / f"{name}.{kind}" for kind in ("png", "svg", "json")))
    with mpl.rc_context():
        mpl.rcdefaults()  # what a user's matplotlibrc says is not ours
        mpl.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        figure = draw(data)
        figure.savefig(files.png, metadata={"Software": None})
        figure.set_layout_engine("none")  # solved once: the SVG has the PNG's places
        figure.savefig(files.svg, transparent=True, metadata={"Date": None, "Creator": None})
    told = {"figure": name, "data": msgspec.to_builtins(data)}
    files.data.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    return files


def canvas(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """Make an empty figure that keeps its parts apart by itself."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def grid_of(count: int, *, columns: int, height_in: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels, `columns` in a row, each row `height_in` inches high."""
    rows = -(-count // columns)
    figure = canvas(height_in * rows)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, axes


def colour_of(policy: str) -> str:
    """Return a policy's colour for bars: OwnerServe's own stand out, a bound is dark, all others
    are grey."""
    if policy.startswith(BOUND):
        return INK
    if policy.startswith(OURS[0]):
        return VERMILLION
    return BLUE if policy.startswith(OURS[1]) else MUTED


def looks(names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Return a colour and a marker for each of at most eight lines; the first that is OwnerServe
    always has the same."""
    others = [index for index, colour in enumerate(CYCLE) if colour != VERMILLION]
    ours = next((name for name in names if name.startswith(OURS[0])), None)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        index = 1 if name == ours else others.pop(0) if others else len(CYCLE) - 1
        found[name] = {"color": CYCLE[index], "marker": MARKERS[index]}
    return found


def short(value: float) -> str:
    """Write a number with three digits, all before the point: 0.123, 7.35, 67,000."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def horizontal_bars(axes: Axes, values: Mapping[str, float | None]) -> None:
    """Draw a bar a name, first on top, its number beside it; "n/a" where there is none."""
    names = list(values)
    lengths = [values[name] or 0.0 for name in names]
    axes.barh(names, lengths, color=[colour_of(name) for name in names], height=0.7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(lengths, default=0) * 1.22 or 1)
    for at, name in enumerate(names):
        value = values[name]
        text = "n/a" if value is None else short(value)
        axes.annotate(
            text, (lengths[at], at), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize=8.5,
        )  # fmt: skip
