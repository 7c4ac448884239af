"""This module shows trace statistics as tables for people. It renders what it is given and computes
nothing."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ownerserve.kv.units import format_bytes
from ownerserve.trace.cost import ModelCost
from ownerserve.trace.lines import Collected
from ownerserve.trace.stats import Distribution, TraceStats

Format = Callable[[float], str]


def tokens(count: float) -> str:
    """Write a count with three digits, as a distribution needs: 1234567 -> '1.23M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def seconds(value: float) -> str:
    """Return seconds as text."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def percent(share: float) -> str:
    """Return a share of 1 in percent, as text."""
    return f"{share:.1%}"


def stats_tables(stats: TraceStats) -> list[Table]:
    """Make the tables of a trace at a glance: distributions, think times, shares. Each fits 80
    columns."""
    tables = [_distributions(stats), _shares(stats)]
    if stats.think_s_after:
        tables.insert(1, _think_times(stats))
    return tables


def _distributions(stats: TraceStats) -> Table:
    title = (
        f"{stats.name} ({stats.origin.split(' {')[0]}): {stats.requests:,} requests, "
        f"{stats.sessions:,} sessions ({stats.grouping}),\n"
        f"{tokens(stats.total_input_tokens)} tokens in, {tokens(stats.total_output_tokens)} out"
    )
    table = _table(title, "n", "mean", "p10", "p50", "p90", "p99")
    rows: list[tuple[str, Distribution | None, Format]] = [
        ("turns a session", stats.turns_per_session, tokens),
        ("input tokens", stats.input_tokens, tokens),
        ("output tokens", stats.output_tokens, tokens),
        ("uncached, later turns", stats.uncached_suffix_tokens, tokens),
        ("gap, start to start", stats.gap_s, seconds),
        ("service time", stats.api_s, seconds),
    ]
    for name, values, form in rows:
        if values is not None:
            numbers = (values.mean, values.p10, values.p50, values.p90, values.p99)
            table.add_row(name, f"{values.count:,}", *map(form, numbers))
    return table


def _think_times(stats: TraceStats) -> Table:
    table = _table("think time after", "n", "mean", "p50", "p90", "p99", "> 60 s", "> 5 min")
    for stop, gaps in stats.think_s_after.items():
        values = gaps.spread
        numbers = map(seconds, (values.mean, values.p50, values.p90, values.p99))
        long = (percent(gaps.share_over_60s), percent(gaps.share_over_300s))
        table.add_row(stop, f"{values.count:,}", *numbers, *long)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shares(stats: TraceStats) -> Table:
    table = _pairs("re-use and skew")
    table.add_row("input / output tokens", f"{stats.input_output_ratio:.3g}")
    ideal, split = stats.ideal_cached_token_share, stats.reuse_split
    if ideal is None or split is None:
        table.add_row("ideal cached-token share", "- (the trace has no block ids)")
    else:
        about = " *" if ideal.estimated else ""
        table.add_row(f"ideal cached-token share, any session{about}", percent(ideal.any_session))
        if ideal.estimated:
            table.caption = "* heads of equal sizes taken as equal"
        table.add_row("ideal cached-token share, own session", percent(ideal.intra_session))
        table.add_row("re-use found in own session", percent(split.intra_session))
        table.add_row("re-use found in another session", percent(split.cross_session))
        table.add_row("re-use found in a widely shared head", percent(split.shared_head))
    table.add_row("input tokens in top 1 % of sessions", percent(stats.input_share.top1))
    table.add_row("input tokens in top 10 % of sessions", percent(stats.input_share.top10))
    if stats.api_share_of_tool_loop is not None:
        share = percent(stats.api_share_of_tool_loop)
        table.add_row("service time / (service + tool time)", share)
    return table


def _pairs(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    return table


def cost_table(cost: ModelCost) -> Table:
    """Make the table of KV bytes a request and prefill's share, for one model."""
    title = f"{cost.model} ({cost.family}, KV as {cost.kv_descriptor})"
    table = _pairs(title)
    table.add_row("state a token", format_bytes(cost.bytes_per_token))
    table.add_row("fixed state a sequence", format_bytes(cost.fixed_bytes_per_sequence))
    table.add_row("KV a request, p50", format_bytes(cost.kv_bytes_per_request.p50))
    table.add_row("KV a request, p99", format_bytes(cost.kv_bytes_per_request.p99))
    for name, share in (
        ("prefill share of compute", cost.prefill_share_of_compute),
        ("... of uncached prompt tokens alone", cost.prefill_share_of_compute_uncached),
    ):
        table.add_row(name, "-" if share is None else percent(share))
    return table


def problem_lines(problems: Collected) -> list[str]:
    """Say what could not be read: how many records, and the first few with their reasons."""
    if not problems.count:
        return []
    lines = [f"left out {problems.count:,} broken record(s):"]
    lines += [f"  {p.file}:{p.line}: {p.reason}" for p in problems.first]
    if problems.count > len(problems.first):
        lines.append(f"  ... and {problems.count - len(problems.first):,} more")
    return lines
