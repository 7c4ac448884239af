"""This module draws figure 2: where a trace's re-use comes from, and how unevenly sessions share
its input."""

from __future__ import annotations

import msgspec
import numpy as np
from matplotlib.figure import Figure

from ownerserve.report.figures.style import BLUE, GREEN, INK, VERMILLION, grid_of, looks

SOURCES = (
    ("intra_session", "own session", BLUE, ""),
    ("cross_session", "another session", VERMILLION, "//"),
    ("shared_head", "widely shared head", GREEN, ".."),
)


class ReuseShares(msgspec.Struct, frozen=True):
    """The shares are of all re-usable tokens; they add up to 1."""

    intra_session: float
    cross_session: float
    shared_head: float


class ReuseTopology(msgspec.Struct, frozen=True):
    """The data of figure 2 stands by trace.

    `splits` by trace (the seed's own numbers may stand among them). `inputs`: trace -> input tokens
    of each session.
    """

    splits: dict[str, ReuseShares]
    inputs: dict[str, list[int]]


def reuse_topology(data: ReuseTopology) -> Figure:
    """Draw two panels: stacked shares, and how the input is spread over sessions.

    The right one is the share of all input in the largest x % of sessions, with the top 1 % marked.
    """
    figure, (split, skew) = grid_of(2, columns=2, height_in=4.2)
    names = list(data.splits)
    left = np.zeros(len(names))
    for field, label, colour, hatch in SOURCES:
        shares = np.array([getattr(data.splits[name], field) for name in names]) * 100
        split.barh(
            names, shares, left=left, color=colour, hatch=hatch, edgecolor="white", label=label,
            height=0.6,
        )  # fmt: skip
        for at, share in enumerate(shares):
            if share >= 8:
                middle = left[at] + share / 2
                split.text(middle, at, f"{share:.1f}", color="white", ha="center", va="center")
        left += shares
    split.invert_yaxis()
    split.grid(axis="y", visible=False)
    split.set_xlabel("% of re-usable prompt tokens")
    split.set_title("Where re-use comes from")
    split.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    for name, look in looks(list(data.inputs)).items():
        inputs = np.sort(np.array(data.inputs[name], dtype=np.float64))[::-1]
        of_sessions = np.arange(1, len(inputs) + 1) / len(inputs) * 100
        of_input = np.cumsum(inputs) / max(inputs.sum(), 1) * 100
        top = float(np.interp(1, of_sessions, of_input))
        line = {**look, "marker": ""}
        skew.plot(of_sessions, of_input, label=f"{name}: top 1 % has {top:.1f} %", **line)
        skew.plot([1], [top], linestyle="", **look)
    skew.axvline(1, color=INK, linestyle=":", linewidth=1)
    skew.set_xscale("log")
    skew.xaxis.set_major_formatter("{x:g}")
    skew.set_xlabel("largest x % of sessions")
    skew.set_ylabel("% of all input tokens")
    skew.set_title("How unevenly sessions use input")
    skew.legend(loc="upper left")
    return figure
