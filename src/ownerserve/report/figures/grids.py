"""This module draws maps of numbers.

Figure 10 is pending prefill by worker and time, with moves as arrows; the matrix sets P and D
workers beside the hybrid fleet of as many.
"""

from __future__ import annotations

import msgspec
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from ownerserve.report.figures.style import INK, MUTED, VERMILLION, canvas

COLOURS = "cividis"
"""Even in lightness, and the same to the colour-blind."""


class MoveAt(msgspec.Struct, frozen=True):
    """A move goes from one worker to another at an instant; workers are indices."""

    at_s: float
    source: int
    target: int


class HeatMap(msgspec.Struct, frozen=True):
    """The data of figure 10 has in `pending_prefill_tokens` a row a worker, a number for each of
    `times_s`."""

    title: str
    times_s: list[float]
    pending_prefill_tokens: list[list[float]]
    moves: list[MoveAt]


def heat_map(data: HeatMap) -> Figure:
    """Draw the map, linear from zero to the 99.5th percentile, so that one peak does not blind the
    rest."""
    shape = (len(data.pending_prefill_tokens), len(data.times_s))
    pending = np.array(data.pending_prefill_tokens, dtype=np.float64).reshape(shape)
    figure = canvas(1.7 + 0.3 * min(len(pending), 24))
    axes = figure.add_subplot()
    axes.grid(visible=False)
    steps = np.diff(data.times_s)
    width = float(steps.mean()) if len(steps) else 1.0
    end_s = data.times_s[-1] + width if data.times_s else 1.0
    top = float(np.percentile(pending, 99.5)) if pending.size else 1.0
    start_s = data.times_s[0] if data.times_s else 0.0
    image = axes.imshow(
        pending / 1e3 if pending.size else np.zeros((1, 1)),
        aspect="auto",
        interpolation="nearest",
        cmap=COLOURS,
        vmin=0,
        vmax=top / 1e3 or 1,
        extent=(start_s, end_s, max(len(pending), 1) - 0.5, -0.5),
    )
    for move in data.moves:
        ends = (move.at_s, move.source), (move.at_s, move.target)
        for colour, width_pt, head in (("white", 3.2, 15), (VERMILLION, 1.6, 12)):
            axes.add_patch(
                FancyArrowPatch(
                    *ends,
                    arrowstyle="-|>",
                    mutation_scale=head,
                    color=colour,
                    linewidth=width_pt,
                    shrinkA=0,
                    shrinkB=0,
                )
            )
    axes.set_xlabel("s")
    axes.set_ylabel("worker")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    moves = f"{len(data.moves)} migration{'' if len(data.moves) == 1 else 's'}"
    axes.set_title(f"{data.title}   ({moves})")
    figure.colorbar(image, ax=axes, label="pending prefill, thousand tokens", pad=0.01)
    return figure


class Split(msgspec.Struct, frozen=True):
    """A split is one static fleet. `value` None: it could not serve the trace; `note` is printed
    below it."""

    prefill: int
    decode: int
    value: float | None
    note: str = ""


class SplitMatrix(msgspec.Struct, frozen=True):
    """The data of the matrix has in `hybrid` workers in all -> the same metric of that many
    PD-hybrid ones."""

    title: str
    metric: str
    better: str
    splits: list[Split]
    hybrid: dict[int, float]


def split_matrix(data: SplitMatrix) -> Figure:
    """Draw a cell for each static split, coloured by how it stands to the hybrid fleet of as many
    workers.

    The ratio stands under the number, and a frame says that the static one is better.
    """
    most = max((max(split.prefill, split.decode) for split in data.splits), default=1)
    figure = canvas(1.6 + 0.62 * most, 1.9 + 1.02 * most)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    cells = np.full((most, most), np.nan)
    for split in data.splits:
        ratio = _ratio(split, data.hybrid)
        if ratio is not None:
            cells[split.decode - 1, split.prefill - 1] = np.log2(max(ratio, 2.0**-4))
    image = axes.imshow(
        cells, origin="lower", aspect="auto", cmap="RdBu" if data.better == "higher" else "RdBu_r",
        vmin=-2, vmax=2,
    )  # fmt: skip
    for split in data.splits:
        ratio = _ratio(split, data.hybrid)
        x, y = split.prefill - 1, split.decode - 1
        if ratio is None:
            text, colour = f"fails\n{split.note}".rstrip(), MUTED
        else:
            text = f"{split.value:.3g}\nx{ratio:.2f}" + (f"\n{split.note}" if split.note else "")
            colour = "white" if abs(np.log2(max(ratio, 2.0**-4))) > 1.2 else INK
            if (ratio > 1) is (data.better == "higher") and ratio != 1:
                axes.plot(
                    [x - 0.46, x + 0.46, x + 0.46, x - 0.46, x - 0.46],
                    [y - 0.44, y - 0.44, y + 0.44, y + 0.44, y - 0.44], color=INK, linewidth=1.6,
                )  # fmt: skip
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(most), [str(n + 1) for n in range(most)])
    axes.set_yticks(range(most), [str(n + 1) for n in range(most)])
    axes.set_xlabel("prefill workers x")
    axes.set_ylabel("decode workers y")
    axes.set_title(f"{data.title}\n{data.metric} ({data.better} is better)")
    bar = figure.colorbar(image, ax=axes, label="static split / hybrid fleet of x + y", pad=0.01)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["≤ 1/4", "1/2", "1", "2", "≥ 4"])
    return figure


def _ratio(split: Split, hybrid: dict[int, float]) -> float | None:
    whole = hybrid.get(split.prefill + split.decode)
    return split.value / whole if split.value is not None and whole else None
