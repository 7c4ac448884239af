"""This module draws panels of bars, one metric a panel and one bar a policy.

So are figures 4 (three baselines, three failures), 6 (end to end), 7 (ablation of the two pillars)
and seed 001 §5.3's rows.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure

from ownerserve.report.figures.style import GREEN, grid_of, horizontal_bars, short


class Panel(msgspec.Struct, frozen=True):
    """A panel is one metric of all policies.

    `values`: policy -> number, None where it does not tell. `better`: "lower" or "higher".
    `reference`: a line across (a bound, a goal) and what it is.
    """

    title: str
    unit: str
    values: dict[str, float | None]
    better: str = "lower"
    reference: float | None = None
    reference_is: str = ""


class Panels(msgspec.Struct, frozen=True):
    title: str
    panels: list[Panel]
    columns: int = 3


def panels(data: Panels) -> Figure:
    """Draw the panels, each on its own scale, from zero."""
    most = max((len(panel.values) for panel in data.panels), default=1)
    figure, axes = grid_of(
        len(data.panels), columns=min(data.columns, len(data.panels)), height_in=0.9 + 0.25 * most
    )
    figure.suptitle(data.title)
    for axis, panel in zip(axes, data.panels, strict=True):
        horizontal_bars(axis, panel.values)
        axis.set_title(panel.title)
        notes = [panel.unit, "(→ better)" if panel.better == "higher" else "(← better)"]
        if panel.reference is not None:
            axis.axvline(panel.reference, color=GREEN, linestyle="--", linewidth=1.2, zorder=0.5)
            axis.set_xlim(0, max(axis.get_xlim()[1], panel.reference * 1.1))
            notes.append(f"dashed: {panel.reference_is or short(panel.reference)}")
        axis.set_xlabel("   ".join(filter(None, notes)))
    return figure
