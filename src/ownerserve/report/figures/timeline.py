"""This module draws figure 3: who waits for whom.

Beside a user who reads, a slow turn is lost in the pause; in an agent's loop the next turn starts
when the last one ends, so it pushes all others back.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ownerserve.report.figures.style import GRID, INK, VERMILLION, grid_of

KINDS = {
    "turn": ("a turn in the system", VERMILLION, ""),
    "human": ("a person reads, thinks, types", GRID, ".."),
    "tool": ("a tool runs", GRID, "//"),
}


class TimelineSpan(msgspec.Struct, frozen=True):
    """A span is a stretch of a lane. `kind`: "turn", "human" or "tool"."""

    kind: str
    from_s: float
    until_s: float


class Timeline(msgspec.Struct, frozen=True):
    """A timeline is one panel. `lanes`: label -> its spans, in order."""

    title: str
    lanes: dict[str, list[TimelineSpan]]


class Coupling(msgspec.Struct, frozen=True):
    """The data of figure 3 is a panel for each timeline, on one time axis."""

    timelines: list[Timeline]


def coupling_timeline(data: Coupling) -> Figure:
    """Draw lanes of spans; at a lane's end stands how many turns it did and how long it took."""
    most = max((len(timeline.lanes) for timeline in data.timelines), default=1)
    figure, axes = grid_of(len(data.timelines), columns=1, height_in=1.1 + 0.36 * most)
    ends = [
        span.until_s
        for timeline in data.timelines
        for lane in timeline.lanes.values()
        for span in lane
    ]
    for axis, timeline in zip(axes, data.timelines, strict=True):
        for at, spans in enumerate(timeline.lanes.values()):
            for span in spans:
                _, colour, hatch = KINDS[span.kind]
                axis.barh(
                    at, span.until_s - span.from_s, left=span.from_s, height=0.62, color=colour,
                    hatch=hatch, edgecolor="white",
                )  # fmt: skip
            if spans:
                turns = sum(span.kind == "turn" for span in spans)
                axis.annotate(
                    f"{turns} turns, {spans[-1].until_s:.3g} s", (spans[-1].until_s, at),
                    xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
                )  # fmt: skip
        axis.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, max(ends, default=1) * 1.18)
        axis.set_title(timeline.title)
    axes[-1].set_xlabel("s")
    used = {
        span.kind
        for timeline in data.timelines
        for lane in timeline.lanes.values()
        for span in lane
    }
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.4, label=label)
        for kind, (label, colour, hatch) in KINDS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
