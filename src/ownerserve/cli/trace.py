"""`ownerserve trace` wires readers, statistics and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ownerserve.cli.options import FACTOR, SEED, SESSIONS, Count, Finite
from ownerserve.cli.output import OutputFile, console_for, json_option, write_json
from ownerserve.kv.descriptor import load_descriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.trace_table import cost_table, problem_lines, stats_tables
from ownerserve.trace.cost import model_cost, read_config
from ownerserve.trace.lines import Collected, Fatal, disk_bytes
from ownerserve.trace.model import Trace
from ownerserve.trace.read import READERS, read_trace
from ownerserve.trace.stats import measure
from ownerserve.trace.synth.generate import WORKLOADS, generate
from ownerserve.trace.synth.options import MAX_BLOCK, MIN_BLOCK, Options
from ownerserve.trace.transform import keep, scale_gaps, scale_lengths
from ownerserve.trace.write import write_trace

TRACE_PATH = click.Path(exists=True, path_type=Path)

format_option = click.option(
    "--format",
    "format_name",
    type=click.Choice(list(READERS)),
    help="The trace's format; told from its content when not given.",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Stop at the first broken line instead of leaving it out."
)


@click.group("trace", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Read, measure and make workloads.

    A trace is a file (plain or .zst) or a folder of them. Known formats, told from the content:

    \b
      ownerserve     ours, a session a line (docs/traces.md)
      weka           Claude-Code sessions (kv-cache-tester)
      mooncake       Mooncake FAST'25; sessions are inferred
      bailian        Qwen-Bailian
      lmcache[-text] LMCache agent traces
      azure          Azure LLM inference CSV
      llmservingsim  sub_requests; vllm-timings: its measured runs

    \b
    ownerserve trace stats sessions.jsonl.zst
    ownerserve trace generate coding-agent --sessions 50 agents.jsonl.zst
    ownerserve trace convert conversation_trace.jsonl mooncake.jsonl.zst
    """


@command.command(short_help="Measure a trace.")
@click.argument("path", type=TRACE_PATH)
@format_option
@strict_option
@click.option(
    "--model",
    "config",
    metavar="CONFIG.json",
    type=click.Path(path_type=Path),
    help="A model's config.json: adds KV bytes a request and prefill's share of compute.",
)
@click.option("--kv", metavar="DESCRIPTOR", help="Engine KV descriptor for --model (see inspect).")
@click.option(
    "--active-params",
    type=Count(),
    metavar="N",
    help="Parameters a token uses, like 3.3B; needed where --model's configuration does not tell.",
)
@json_option
def stats(
    path: Path,
    *,
    format_name: str | None,
    strict: bool,
    config: Path | None,
    kv: str | None,
    active_params: float | None,
    json_target: str | None,
) -> None:
    """Measure a trace: lengths, gaps, what could be re-used, how uneven sessions are.

    "Ideal" shares assume a cache without limits: re-used prompt tokens of all prompt tokens, from
    any session, or from the request's own. Definitions: docs/traces.md.

    \b
    ownerserve trace stats sessions.jsonl.zst
    ownerserve trace stats sessions.jsonl.zst --model examples/configs/qwen3-30b-a3b.json \\
        --active-params 3.3B --json -
    """
    for flag, given in (("--kv", kv), ("--active-params", active_params)):
        if config is None and given is not None:
            raise InvalidInput(flag, "says something of a model", "name the model: --model")
    console = console_for(json_target)
    trace, problems = _load(path, console, format_name=format_name, strict=strict)
    measured = measure(trace)
    cost = None
    if config is not None:
        cost = model_cost(
            trace,
            read_config(config),
            model=config.stem,
            kv=None if kv is None else load_descriptor(kv),
            parameters=active_params,
        )
    for table in stats_tables(measured):
        console.print(table)
    if cost is not None:
        console.print(cost_table(cost))
        console.print(cost.note, markup=False, highlight=False, end="\n" if cost.note else "")
    body = msgspec.to_builtins(measured)
    body["problems"] = problems.count
    if cost is not None:
        body["model"] = msgspec.to_builtins(cost)
    write_json(json_target, "trace.stats", body)


@command.command(short_help="Turn any trace into our JSONL, whole or cut to size.")
@click.argument("source", type=TRACE_PATH)
@click.argument("target", type=OutputFile())
@format_option
@strict_option
@click.option("--sessions", type=SESSIONS, help="Keep the first N sessions.")
@click.option("--turns", type=click.IntRange(1), help="Keep the first N requests of a session.")
@click.option("--tool-time", type=FACTOR, help="Factor on all waits and arrivals.")
@click.option(
    "--max-tokens",
    type=click.IntRange(16),
    help="Scale all lengths so that the longest prompt + answer has N tokens.",
)
@json_option
def convert(
    source: Path,
    target: Path,
    *,
    format_name: str | None,
    strict: bool,
    sessions: int | None,
    turns: int | None,
    tool_time: float | None,
    max_tokens: int | None,
    json_target: str | None,
) -> None:
    """Turn any trace into our JSONL (compressed when TARGET ends in .zst), whole or cut to size.

    Lengths are scaled with their prefixes: what was shared stays shared.

    \b
    ownerserve trace convert traces/ all.jsonl.zst
    ownerserve trace convert sessions.jsonl.zst tiny.jsonl --sessions 20 --max-tokens 4096
    """
    console = console_for(json_target)
    trace, problems = _load(source, console, format_name=format_name, strict=strict)
    if sessions is not None or turns is not None:
        trace = keep(trace, sessions=sessions, turns=turns)
    if tool_time is not None:
        trace = scale_gaps(trace, tool_time)
    if max_tokens is not None:
        trace = scale_lengths(trace, max_tokens=max_tokens)
    _save(trace, target, console)
    body = {**_summary(trace, target), "problems": problems.count}
    write_json(json_target, "trace.convert", body)


@command.command(name="generate")
@click.argument("workload", metavar="WORKLOAD", type=click.Choice(list(WORKLOADS)))
@click.argument("target", type=OutputFile())
@click.option(
    "--sessions", type=SESSIONS, default=100, show_default=True, help="How many sessions."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Same seed, same bytes.")
@click.option(
    "--skew",
    type=Finite(0, 3),
    default=0.0,
    show_default=True,
    help="Zipf exponent of session length (longdoc: of document popularity).",
)
@click.option(
    "--tool-time", type=FACTOR, default=1.0, show_default=True, help="Factor on all think times."
)
@click.option(
    "--reuse",
    type=Finite(0, 1),
    default=1.0,
    show_default=True,
    help="Share of re-use kept: at 0 no turn finds its history.",
)
@click.option(
    "--rate",
    "arrivals_per_s",
    type=Finite(1e-6, 1e6),
    default=0.1,
    show_default=True,
    help="Sessions a second (Poisson).",
)
@click.option(
    "--block",
    "block_tokens",
    type=click.IntRange(MIN_BLOCK, MAX_BLOCK),
    default=64,
    show_default=True,
    help="Tokens a block id.",
)
@click.option(
    "--max-input",
    "max_input_tokens",
    type=click.IntRange(1024, 100_000_000),
    default=1_000_000,
    show_default=True,
    help="Longest prompt, in tokens; longer contexts are compacted.",
)
@json_option
def generate_command(
    workload: str, target: Path, *, json_target: str | None, **chosen: int | float
) -> None:
    """Make a seeded workload.

    \b
      coding-agent  tool loops with sub-agents, calibrated to 570 Claude-Code sessions
      chat          people talking (Mooncake's lengths and gaps)
      thinking      short questions, answers of thousands of tokens
      swe           SWE-like tasks with fast tools
      rollouts      8 forked samples of one task prefix
      longdoc       questions on long documents

    \b
    ownerserve trace generate coding-agent agents.jsonl.zst --sessions 570 --seed 1
    ownerserve trace generate coding-agent hot.jsonl --skew 1.2 --tool-time 0.1
    """
    console = console_for(json_target)
    options = msgspec.convert(chosen, Options)
    options.check()
    with _progress(console, f"making {workload}", options.sessions) as advance:
        trace = generate(workload, options, on_session=lambda: advance(1))
    _save(trace, target, console)
    write_json(json_target, "trace.generate", _summary(trace, target))


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a bar that is gone when the work is done; it shows nothing when no terminal looks
    on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(escape(what), total=total)
        yield lambda amount: progress.advance(task, amount)


def _load(
    path: Path, console: Console, *, format_name: str | None, strict: bool
) -> tuple[Trace, Collected]:
    """Read with a bar; problems are shown, also when nothing else could be read, or fatal."""
    collected = Collected()
    try:
        with _progress(console, f"reading {path.name}", disk_bytes(path)) as advance:
            trace = read_trace(
                path,
                format_name=format_name,
                problems=Fatal() if strict else collected,
                on_bytes=advance,
            )
    finally:
        for line in problem_lines(collected):
            console.print(line, style="yellow", markup=False, highlight=False)
    return trace, collected


def _save(trace: Trace, target: Path, console: Console) -> None:
    with _progress(console, f"writing {target.name}", len(trace.sessions)) as advance:
        write_trace(trace, target, on_session=lambda: advance(1))
    console.print(
        f"{target}: {len(trace.sessions):,} sessions, {trace.request_count:,} requests, "
        f"{target.stat().st_size:,} bytes",
        markup=False,
        highlight=False,
    )


def _summary(trace: Trace, target: Path) -> dict[str, object]:
    return {
        "path": str(target),
        "sessions": len(trace.sessions),
        "requests": trace.request_count,
        "total_input_tokens": trace.input_tokens,
        "bytes": target.stat().st_size,
    }
