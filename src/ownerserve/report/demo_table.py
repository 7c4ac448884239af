"""This module sets the demo's policies side by side: first by what no clock measures, then by their
times.

Each policy ran several times; a table shows how far its runs lie apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from ownerserve.kv.units import format_bytes
from ownerserve.report.demo_machine import MachineLoad
from ownerserve.report.demo_results import PolicyResult

Row = tuple[str, list[str]]
Runs = Mapping[str, Sequence[PolicyResult]]
"""What each run of each policy measured, in the order in which they ran."""

SOURCES = (
    ("own\ndevice", "device"),
    ("own\nhost", "host"),
    ("\npeer", "peer"),
    ("\napart", "remote_prefill"),
)
"""Where prompt tokens were at hand, as a heading and by its name in a result."""

COUNTS_NOTE = (
    "computed: prompt tokens that workers computed, whichever they were, twice where two did;"
    " cached: the share that none did. Of the prompt, what the worker that answered had (own"
    " device), brought from its host memory, read of a peer that had it, or of the peer that"
    " computed it for this turn (apart). peer bytes: what workers read of each other. turns apart:"
    " those whose prompt another worker computed. moves: turns that ran elsewhere than their"
    " session's turn before. equal: all answers are those of the first run. Two figures: the least"
    " and the most of the repeats, as who is busy when a turn comes decides too."
)


class Spanned(msgspec.Struct, frozen=True):
    """A spanned figure is the median over repeats, and the least and the most of them."""

    median: float
    least: float
    most: float


class Times(msgspec.Struct, frozen=True):
    """The times of a policy, each over its repeats: of a turn, of a session, and of the run over
    how long it takes when answers cost no time."""

    ttft_p50_ms: Spanned
    ttft_p90_ms: Spanned
    tpot_p90_ms: Spanned
    session_s: Spanned
    wall_clock_factor: Spanned


def spanned(values: Sequence[float]) -> Spanned:
    """Return the median of `values`, of which there is at least one, with the least and the
    most."""
    return Spanned(float(np.median(values)), min(values), max(values))


def times_of(runs: Sequence[PolicyResult]) -> Times:
    """Return the times of one policy's runs."""
    return Times(
        ttft_p50_ms=spanned([run.ttft_ms.p50 for run in runs]),
        ttft_p90_ms=spanned([run.ttft_ms.p90 for run in runs]),
        tpot_p90_ms=spanned([run.tpot_ms.p90 for run in runs]),
        session_s=spanned([run.e2e_s.mean for run in runs]),
        wall_clock_factor=spanned([run.wall_clock_factor for run in runs]),
    )


def ratio(mine: Spanned, reference: Spanned) -> Spanned | None:
    """Return the ratio of two medians, with the least and the most that the repeats allow; None
    where there is nothing to divide by."""
    if not reference.least:
        return None
    return Spanned(
        mine.median / reference.median, mine.least / reference.most, mine.most / reference.least
    )


def counts_table(runs: Runs, *, equal: Mapping[str, str]) -> Table:
    """Make the table of what no clock measures, a row for each policy; `equal` says of each whether
    its answers are the first one's."""
    every = [run for repeats in runs.values() for run in repeats]
    asked = _span([run.requests for run in every], "{:,}".format, between=" to ")
    prompt = _span([run.prompt_tokens for run in every], "{:,}".format, between=" to ")
    table = _table(f"What each policy did with {asked} requests, {prompt} prompt tokens")
    for heading in ("tokens\ncomputed", "cached\nshare", *(name for name, _ in SOURCES)):
        table.add_column(heading, justify="right", overflow="fold")
    for heading in ("peer\nbytes", "turns\napart", "\nmoves", "\nequal"):
        table.add_column(heading, justify="right", overflow="fold")
    for name, repeats in runs.items():
        table.add_row(
            name,
            _span([run.computed_tokens for run in repeats], "{:,}".format),
            _span([run.cached_token_share for run in repeats], "{:.1%}".format),
            *(
                _span([run.share_of(source) for run in repeats], "{:.1%}".format)
                for _, source in SOURCES
            ),
            _span([run.peer_bytes for run in repeats], format_bytes),
            _span([run.turns_apart for run in repeats], str),
            _span([run.moves for run in repeats], str),
            equal[name],
        )
    return table


def times_table(runs: Runs, *, reference: str, machine: MachineLoad) -> Table:
    """Make the table of times, a row for each policy: medians, their spread, and at last how the
    first time stands to that of `reference`, marked where the machine was loaded."""
    table = _table(f"Times on this machine of {machine.cores} cores")
    for heading in ("TTFT ms\np50", "\np90", "TPOT ms\np90", "session\ns, mean"):
        table.add_column(heading, justify="right", overflow="fold")
    for heading in ("wall-clock\nfactor", f"TTFT p50 over\n{reference}'s"):
        table.add_column(heading, justify="right", overflow="fold")
    mark = " ?" if machine.warning else ""
    theirs = times_of(runs[reference])
    for name, repeats in runs.items():
        mine = times_of(repeats)
        over = ratio(mine.ttft_p50_ms, theirs.ttft_p50_ms)
        is_compared = over is not None and name != reference
        table.add_row(
            name,
            _over_repeats(mine.ttft_p50_ms, "{:.0f}".format),
            _over_repeats(mine.ttft_p90_ms, "{:.0f}".format),
            _over_repeats(mine.tpot_p90_ms, "{:.1f}".format),
            _over_repeats(mine.session_s, "{:.2f}".format),
            _over_repeats(mine.wall_clock_factor, "{:.2f}".format),
            _over_repeats(over, "{:.2f}".format, mark=mark) if over and is_compared else "-",
        )
    return table


def times_note(runs: Runs) -> str:
    """Say what the columns of the table of times mean."""
    repeats = min(map(len, runs.values()))
    spread = (
        f"Medians of {repeats} repeats, and under each the least and the most of them; of a ratio,"
        " what they allow."
        if repeats > 1
        else "One run of each policy: how far chance alone goes is not known (--repeats)."
    )
    return (
        "TTFT: from the request to its first token; TPOT: of each token after it; session: from a"
        " session's first request to its last token, tool gaps in it; wall-clock factor: a run over"
        f" how long it takes when answers cost no time. {spread}"
    )


def _table(title: str) -> Table:
    """Return a table with a column for policies, in which eleven more fit in 80 columns."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    table.add_column("policy", no_wrap=True)
    return table


def _span(values: Sequence[float], form: Callable[..., str], *, between: str = "\n") -> str:
    """Write the least and the most of `values`, once where they read the same."""
    return between.join(dict.fromkeys((form(min(values)), form(max(values)))))


def _over_repeats(figure: Spanned, form: Callable[[float], str], *, mark: str = "") -> str:
    """Write a figure, and under it the least and the most, unless they read the same."""
    least, most = form(figure.least), form(figure.most)
    under = "" if least == most else f"\n{least}-{most}"
    return f"{form(figure.median)}{mark}{under}"


def heat_line(name: str, runs: Iterable[PolicyResult]) -> str:
    """Say how many turns left a hot worker in all runs of the policy `name`, or why none did, by
    its decisions."""
    reasons = Counter[str]()
    for run in runs:
        reasons.update(run.reasons)
    moves = reasons["hot_owner"]
    if moves:
        return f"{name}: {moves} turn{'s' * (moves > 1)} left a hot worker"
    cooling, stuck, dear = (reasons[f"hot_{why}"] for why in ("cooling", "no_target", "too_dear"))
    met = cooling + stuck + dear
    if not met:
        return (
            f"{name}: no turn left its worker for heat: at no turn's arrival was its worker busier"
            " than T_hot and than the least busy one by the hot ratio (docs/routing.md)"
        )
    return (
        f"{name}: no turn left its worker for heat, though {met} met a hot one:"
        f" {stuck} had no other with room;"
        f" {dear} had one with room, where the turn would have cost more than the wait;"
        f" {cooling} had moved a short time before"
    )


def detail_table(title: str, results: Mapping[str, PolicyResult]) -> Table:
    """Make the long table of what no clock measures: policies as columns, a run of each."""
    return _long_table(title, results, _counted(list(results.values())))


def engines_table(results: Mapping[str, PolicyResult]) -> Table:
    """Make the table of engines that ran once each: their times, and all else."""
    columns = list(results.values())
    rows = [*_timed(columns), *_counted(columns)]
    return _long_table("One workload, each engine on fresh workers", results, rows)


def _long_table(title: str, names: Iterable[str], rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for label, cells in rows:
        table.add_row(label, *cells)
    return table


def _timed(columns: Sequence[PolicyResult]) -> Iterator[Row]:
    yield ("TTFT p50 / p90, ms", [f"{c.ttft_ms.p50:.0f} / {c.ttft_ms.p90:.0f}" for c in columns])
    yield ("TPOT p90, ms", [f"{c.tpot_ms.p90:.1f}" for c in columns])
    yield ("wall-clock factor", [f"{c.wall_clock_factor:.2f}" for c in columns])
    yield ("session end to end, mean s", [f"{c.e2e_s.mean:.2f}" for c in columns])
    yield ("session end to end, p95 s", [f"{c.e2e_s.p95:.2f}" for c in columns])


def _counted(columns: Sequence[PolicyResult]) -> Iterator[Row]:
    yield ("requests", [str(c.requests) for c in columns])
    yield ("errors", [str(c.errors) for c in columns])
    yield ("prompt tokens", [f"{c.prompt_tokens:,}" for c in columns])
    yield ("cached-token share", [f"{c.cached_token_share:.1%}" for c in columns])
    yield ("prefill tokens saved", [f"{c.prefill_tokens_saved:,}" for c in columns])
    yield ("tokens computed", [f"{c.computed_tokens:,}" for c in columns])
    for source in dict.fromkeys(name for c in columns for name in c.sources):
        cells = [f"{c.sources.get(source, 0):,}" for c in columns]
        yield (f"tokens at hand: {source}", cells)
    yield ("bytes read of peers", [format_bytes(c.peer_bytes) for c in columns])
    yield ("moves", [str(c.moves) for c in columns])
    yield ("hotspot index", [f"{c.hotspot_index:.2f}" for c in columns])
    yield ("heat moves", [str(c.heat_moves) for c in columns])
    yield (
        "requests by worker",
        [" / ".join(map(str, c.requests_by_worker.values())) for c in columns],
    )
    for mode in sorted({mode for c in columns for mode in c.modes}):
        yield (f"turns: {mode}", [str(c.modes.get(mode, 0)) for c in columns])
    yield ("evictions", [f"{c.pressure.evictions:,}" for c in columns])
    yield ("tokens evicted", [f"{c.pressure.evicted_tokens:,}" for c in columns])
    yield ("freed beyond need, tokens", [f"{c.pressure.beyond_need_tokens:.1f}" for c in columns])
    for reason in sorted({reason for c in columns for reason in c.pressure.points_lost}):
        cells = [f"{c.pressure.points_lost.get(reason, 0):,}" for c in columns]
        yield (f"restorable points lost: {reason}", cells)
    yield ("runs at a low watermark", [f"{c.pressure.relief_runs:,}" for c in columns])
    for component in dict.fromkeys(n for c in columns for n in c.pressure.evicted_slots):
        cells = [f"{c.pressure.evicted_slots.get(component, 0):,}" for c in columns]
        yield (f"evicted: {component}", cells)
    for component in dict.fromkeys(n for c in columns for n in c.pressure.spilled_slots):
        cells = [f"{c.pressure.spilled_slots.get(component, 0):,}" for c in columns]
        yield (f"spilled to host memory: {component}", cells)
    for message in sorted({message for c in columns for message in c.directory_messages}):
        cells = [f"{c.directory_messages.get(message, 0):,}" for c in columns]
        yield (f"directory: {message}", cells)
    yield ("directory: workers' frames", [f"{c.directory_frames:,}" for c in columns])
    for request in sorted({request for c in columns for request in c.node_requests}):
        yield (f"node RPC: {request}", [f"{c.node_requests.get(request, 0):,}" for c in columns])
    for component in dict.fromkeys(name for c in columns for name in c.kv_bytes):
        cells = [format_bytes(c.kv_bytes.get(component, 0)) for c in columns]
        yield (f"KV kept: {component}", cells)
