"""The `demo` command wires workload, fleet, client and table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ownerserve.cli.demo.cold_resume import ColdResume, cold_resume
from ownerserve.cli.demo.compare import Comparison, compare
from ownerserve.cli.demo.drive import TurnAnswer
from ownerserve.cli.demo.fleets import ALL_POLICIES, PD_HYBRID, can_run, run_of
from ownerserve.cli.demo.processes import terminate_as_interrupt
from ownerserve.cli.demo.run import DemoSetup, run_policy
from ownerserve.cli.demo.vllm_command import VllmDemo, run_vllm_demo
from ownerserve.cli.demo.workload import Transcript, conversations
from ownerserve.cli.options import FACTOR, SEED
from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.report.demo_table import PolicyResult, heat_line, policy_table, summary_table
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.transform import keep, scale_lengths

POLICIES = (
    "round_robin", "least_load", "ownerserve", PD_HYBRID, "lmetric", "sticky", "ear", "static_pd",
)  # fmt: skip
"""Compared by default: seed 002's baselines, EAR, prefill apart as a rule, and ours, on hybrid
workers and where prompts may be computed apart. Ours is not last: a machine warms up."""
OURS = "ownerserve"

HEAT_POLICIES = ("ear", "ownerserve")
"""The policies that move sessions away from hot workers."""

DETAILED_MAX = 3
"""Policies side by side in the long table; of more, the first and ours, or the last (--json has
all)."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="tiny-v4", show_default=True, help="A tiny-* model of the worker.")
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(ALL_POLICIES),
    help=f"Once for each policy to run. Default: {', '.join(POLICIES)}. Where pd is in the name,"
    " half of the workers compute prompts for the others; pd_hybrid is ownerserve on such workers.",
)
@click.option(
    "--policies",
    "which",
    type=click.Choice(("compared", "all")),
    default="compared",
    help="all: every policy that this fleet can carry out.",
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(exists=True, path_type=Path),
    help="Drive a real trace (any format of `ownerserve trace`) instead of a generated one.",
)
@click.option(
    "--sessions",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Sessions taken or generated.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Requests of each session, at most.",
)
@click.option(
    "--context",
    type=click.IntRange(64, 1_000_000),
    default=3000,
    show_default=True,
    help="Longest prompt + answer in tokens; all lengths of the trace are scaled to fit.",
)
@click.option(
    "--time-scale",
    type=FACTOR,
    default=0.02,
    show_default=True,
    help="Factor on recorded tool gaps and arrivals: 0.02 turns 50 s into 1 s.",
)
@click.option(
    "--kv-memory",
    default="900KiB",
    show_default=True,
    help="KV pool of each worker. Small, so that sessions compete for it.",
)
@click.option(
    "--host-cache",
    default="2MiB",
    show_default=True,
    help="Host memory of each worker for what its KV pool can't hold; 0: what goes is lost.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the generated workload.")
@click.option(
    "--engine",
    type=click.Choice(("hf", "vllm")),
    default="hf",
    show_default=True,
    help="vllm: real `vllm serve` workers, alone and with OwnerServe; --model, --policy and the "
    "memory options are hf's.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    help="The Python vLLM is installed in. Default: .venv-vllm here, or this one.",
)
@json_option
def command(
    model: str,
    workers: int,
    policies: tuple[str, ...],
    which: str,
    trace_path: Path | None,
    sessions: int,
    turns: int,
    context: int,
    time_scale: float,
    kv_memory: str,
    host_cache: str,
    seed: int,
    engine: str,
    vllm_python: Path | None,
    json_target: str | None,
) -> None:
    """A gateway, two workers and coding agents, end to end, once for each policy.

    Starts real processes on free ports, drives the workload over HTTP in a closed loop (a turn
    starts when its tools are done), checks that every policy gave the same answers, prints what
    each cost, and stops everything. Ctrl-C does too. At the end a session outlives its worker:
    the next one fetches it from a store, by a priced plan, beside one that computes it anew.

    \b
    ownerserve demo
    ownerserve demo --sessions 16 --kv-memory 64MiB         room for all
    ownerserve demo --trace sessions.jsonl.zst --turns 20   a real trace, scaled
    ownerserve demo --model tiny-qwen3next --json result.json
    ownerserve demo --engine vllm                           real vLLM workers, and a crash
    """
    console = console_for(json_target)
    trace = _scaled(_source(trace_path, sessions, seed), sessions, turns=turns, context=context)
    turns_of = conversations(trace, time_scale=time_scale)
    if engine == "vllm":
        run_vllm_demo(console, VllmDemo(vllm_python, trace, turns_of, workers), json_target)
        return
    setup = DemoSetup(model, workers, kv_memory, host_cache, turns_of)
    size = f"{len(setup.conversations)} sessions, {trace.request_count} requests"
    told = f"{trace.input_tokens:,} prompt tokens of {trace.name}; {workers} workers of {model}"
    console.print(f"{size}, {escape(told)}")
    chosen = policies or can_run(ALL_POLICIES if which == "all" else POLICIES, workers)
    results, answers = _run_all(console, chosen, setup, trace.request_count)
    comparisons = _compare_all(answers)
    _show(console, results, comparisons)
    resumed = _resume(console, model, context)
    body = {
        "policies": results,
        "answers_equal": all(c.equal for c in comparisons.values()),
        "comparisons": comparisons,
        "cold_resume": resumed,
        "workload": {"name": trace.name, "seed": seed, "requests": trace.request_count},
        "model": model,
        "workers": workers,
    }
    write_json(json_target, "demo", msgspec.to_builtins(body))
    failed = [error for result in results.values() for error in result.first_errors]
    if failed or not body["answers_equal"]:
        raise click.ClickException("; ".join(failed) or "policies gave different answers")


def _show(
    console: Console, results: dict[str, PolicyResult], comparisons: dict[str, Comparison]
) -> None:
    names = list(results)
    shown = names
    if len(names) > DETAILED_MAX:
        shown = [names[0], OURS if OURS in names[1:] else names[-1]]
    console.print(policy_table({name: results[name] for name in shown}))
    console.print(summary_table(results))
    for name in HEAT_POLICIES:
        if name in results:
            console.print(heat_line(name, results[name]), highlight=False)
    for name, comparison in comparisons.items():
        console.print(_verdict(next(iter(results)), name, comparison))


def _run_all(
    console: Console, policies: Sequence[str], setup: DemoSetup, requests: int
) -> tuple[dict[str, PolicyResult], dict[str, list[TurnAnswer]]]:
    """Run every policy and return its result and answers, under a bar each of `requests`."""
    results: dict[str, PolicyResult] = {}
    answers: dict[str, list[TurnAnswer]] = {}
    transcript: Transcript = {}
    runs = {policy: run_of(policy, setup.workers) for policy in policies}
    with terminate_as_interrupt(), _progress(console) as bar:
        for policy in policies:
            task = bar.add_task(policy, total=requests)
            results[policy], answers[policy] = run_policy(
                runs[policy], setup, transcript, on_turn=partial(_advance, bar, task)
            )
    return results, answers


def _source(trace_path: Path | None, sessions: int, seed: int) -> Trace:
    if trace_path is not None:
        return read_trace(trace_path)
    return generate("coding-agent", Options(sessions=sessions, seed=seed, arrivals_per_s=0.05))


def _scaled(trace: Trace, sessions: int, *, turns: int, context: int) -> Trace:
    return scale_lengths(keep(trace, sessions=sessions, turns=turns), max_tokens=context)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _resume(console: Console, model: str, context: int) -> ColdResume:
    console.print("a session outlives its worker ...")
    with terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as folder:
        resumed = cold_resume(Path(folder), model=model, context=context)
    console.print("\n".join(resumed.lines()))
    return resumed


def _advance(bar: Progress, task: TaskID, answer: TurnAnswer) -> None:
    bar.advance(task)


def _compare_all(answers: dict[str, list[TurnAnswer]]) -> dict[str, Comparison]:
    """Compare each policy's answers with the first one's."""
    names = list(answers)
    return {name: compare(answers[names[0]], answers[name]) for name in names[1:]}


def _verdict(reference: str, name: str, comparison: Comparison) -> str:
    word = "equal" if comparison.equal else "DIFFERENT"
    lines = [
        f"answers of {name} and {reference}: {word} "
        f"({comparison.tokens_compared:,} tokens, largest logprob difference "
        f"{comparison.max_logprob_difference:.1e}, {len(comparison.flips)} argmax flips, "
        f"{comparison.missing} missing)"
    ]
    lines += [
        f"  flip in {flip.session} turn {flip.turn} at token {flip.position}, "
        f"margin {flip.margin:.1e}"
        for flip in comparison.flips[:5]
    ]
    return "\n".join(lines)
