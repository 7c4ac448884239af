"""This module draws dispatch coupling.

Figure 1 is wall clock over trace time, by policy; figure 8 sets the measured points beside the law
1 / (1 - Lambda N W'(L*)).
"""

from __future__ import annotations

import msgspec
import numpy as np
from matplotlib.figure import Figure

from ownerserve.report.figures.style import INK, canvas, horizontal_bars, looks

GAIN_SHOWN = 0.95
LAW = r"$1\,/\,(1-\Lambda N W'(L^*))$"


class Amplification(msgspec.Struct, frozen=True):
    """The data of figure 1 has makespan / trace span (wall_clock_factor) for each policy."""

    title: str
    factors: dict[str, float | None]


def amplification(data: Amplification) -> Figure:
    """Draw a bar for each policy, and the line y = 1: as fast as the trace."""
    figure = canvas(1.3 + 0.34 * len(data.factors))
    axes = figure.add_subplot()
    horizontal_bars(axes, data.factors)
    axes.axvline(1.0, color=INK, linestyle="--", linewidth=1)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.15))
    axes.set_xlabel("wall clock / trace time   (dashed: 1, ← better)")
    axes.set_title(data.title)
    return figure


class CoupledPoint(msgspec.Struct, frozen=True):
    """A point is one run: W, the gain Lambda N W'(L*) and the amplification that it showed."""

    policy: str
    turn_s: float
    gain: float
    measured: float


class Coupled(msgspec.Struct, frozen=True):
    title: str
    points: list[CoupledPoint]


def coupled(data: Coupled) -> Figure:
    """Draw two panels. Left: the law against the gain. Right: the seed's axes, amplification
    against turn time."""
    figure = canvas(4.3)
    law = figure.add_subplot(1, 2, 1)
    seed = figure.add_subplot(1, 2, 2, sharey=law)
    gains = np.linspace(0, GAIN_SHOWN, 200)
    law.plot(gains, 1 / (1 - gains), color=INK, linestyle="--", label=LAW)
    for policy, look in looks(list(dict.fromkeys(p.policy for p in data.points))).items():
        own = [point for point in data.points if point.policy == policy]
        measured = [point.measured for point in own]
        law.scatter([point.gain for point in own], measured, label=policy, **look)
        seed.scatter([point.turn_s for point in own], measured, label=policy, **look)
    law.set_xlabel(r"gain $\Lambda N W'(L^*)$, measured")
    seed.set_xlabel("W: mean turn time, s")
    for axes in (law, seed):
        axes.set_ylabel("amplification")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    law.set_title(data.title)
    law.legend()
    return figure
