"""The `demo` command says what is to run: the workload, the fleet, the policies."""

from __future__ import annotations

from pathlib import Path

import click

from ownerserve.cli.demo.fleets import ALL_POLICIES, PD_HYBRID, can_run
from ownerserve.cli.demo.hf_command import HfDemo, run_hf_demo
from ownerserve.cli.demo.run import DemoSetup
from ownerserve.cli.demo.vllm_command import VllmDemo, run_vllm_demo
from ownerserve.cli.demo.workload import conversations
from ownerserve.cli.options import FACTOR, SEED
from ownerserve.cli.output import console_for, json_option
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
    "--repeats",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    help="Rounds: runs of each policy.",
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
    default=5,
    show_default=True,
    help="Requests of each session, at most.",
)
@click.option(
    "--context",
    type=click.IntRange(64, 1_000_000),
    default=2000,
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
    default="640KiB",
    show_default=True,
    help="KV pool of each worker. Small, so that sessions compete for it.",
)
@click.option(
    "--host-cache",
    default="1.4MiB",
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
    repeats: int,
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
    """A gateway, two workers and coding agents, end to end, under one policy after another.

    Starts real processes on free ports, drives the workload over HTTP in a closed loop (a turn
    starts when its tools are done), checks that every policy gave the same answers, prints what
    each cost, and stops everything. Ctrl-C does too. At the end a session outlives its worker:
    the next one fetches it from a store, by a priced plan, beside one that computes it anew.

    Policies run in rounds, there and back, each run on workers of its own. The first table has
    what no clock measures. Times come after, as medians with their spread, and with a warning
    where the machine was busy with other work.

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
    chosen = policies or can_run(ALL_POLICIES if which == "all" else POLICIES, workers)
    demo = HfDemo(setup, trace, chosen, repeats, context, seed)
    run_hf_demo(console, demo, json_target)


def _source(trace_path: Path | None, sessions: int, seed: int) -> Trace:
    if trace_path is not None:
        return read_trace(trace_path)
    return generate("coding-agent", Options(sessions=sessions, seed=seed, arrivals_per_s=0.05))


def _scaled(trace: Trace, sessions: int, *, turns: int, context: int) -> Trace:
    return scale_lengths(keep(trace, sessions=sessions, turns=turns), max_tokens=context)
