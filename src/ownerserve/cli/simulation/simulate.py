"""`ownerserve simulate` replays a trace against policies, in seconds instead of GPU hours."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ownerserve.cache.policies import DEFAULT_EVICTION, EVICTION_POLICIES
from ownerserve.cli.options import FACTOR, SEED, SESSIONS, Finite
from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.cli.simulation.runners import runner_of, runner_options
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.units import parse_bytes
from ownerserve.plan.inputs import ENGINES
from ownerserve.report.simulate_table import (
    Simulated,
    details_table,
    modes_table,
    summary_table,
    to_json,
)
from ownerserve.report.unserved import served_nothing, unserved
from ownerserve.router.admission import SeatSettings
from ownerserve.router.policies import ROUTING_POLICIES
from ownerserve.sim.config.faults import Fault, read_faults
from ownerserve.sim.config.setup import PD, Links, SimSetup, Tiers
from ownerserve.sim.engine.batch import FOLD_MAX
from ownerserve.sim.engine.pace import paces
from ownerserve.sim.metrics.spreads import known
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.pool import PARTS
from ownerserve.sim.sweep import Jobs, metrics_of, run_all
from ownerserve.sim.workload import (
    Capped,
    Closed,
    First,
    Open,
    Sample,
    SharedHeads,
    TopShare,
    WorkloadShape,
)
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import WORKLOADS, generate
from ownerserve.trace.synth.options import Options

DEFAULT_POLICIES = "round_robin,least_load,lmetric,sticky,ear,ownerserve"


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=(DEFAULT_POLICIES,),
    show_default=True,
    metavar="NAME,...",
    help=f"Router policies, or 'all'; may be given again: {', '.join(ROUTING_POLICIES)}.",
)
@click.option(
    "--workers", type=click.IntRange(1, 10_000), default=8, show_default=True, help="Routing units."
)
@click.option(
    "--prefill-workers",
    type=click.IntRange(0, 10_000),
    default=0,
    show_default=True,
    help="Of the workers, those that only prefill. 0: half of them, for policies that split.",
)
@click.option(
    "--workers-per-host",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="N workers share a host's --pcie, --nic and drive (3 GB/s). The last may have fewer.",
)
@click.option(
    "--gateways",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Among which sessions are shared out; of the others' turns each knows what workers say.",
)
@click.option(
    "--pace",
    default="qwen3-30b-a3b@h200",
    show_default=True,
    metavar="MODEL@GPU|FILE.json",
    help="What a step takes: a shipped pace (see --paces) or one's own (tools/fit_pace.py).",
)
@click.option("--paces", "lists_paces", is_flag=True, help="List the shipped paces and leave.")
@click.option("--kv", metavar="SIZE", help="Device memory for state of a worker.  [the GPU's]")
@click.option(
    "--evict",
    type=click.Choice(list(EVICTION_POLICIES)),
    default=DEFAULT_EVICTION,
    show_default=True,
    help="What goes first when device memory is short; pinned-slot is the baseline that can lock.",
)
@click.option("--host", default="0", show_default=True, metavar="SIZE", help="Host cache.")
@click.option("--disk", default="0", show_default=True, metavar="SIZE", help="SSD of a worker.")
@click.option("--remote", default="0", show_default=True, metavar="SIZE", help="Shared store.")
@click.option(
    "--nic",
    type=Finite(1e-3, 1e6),
    default=12.5,
    show_default=True,
    metavar="GB/S",
    help="GB/s between hosts.",
)
@click.option(
    "--pcie",
    type=Finite(1e-3, 1e6),
    default=51.2,
    show_default=True,
    metavar="GB/S",
    help="GB/s between a host's devices and its memory, each way.",
)
@click.option(
    "--checkpoints",
    default="turn-end",
    show_default=True,
    help="Which point state is stored: full, periodic:N, zero, turn-end, branches, adaptive.",
)
@click.option(
    "--engine-abilities",
    "abilities",
    type=click.Choice(list(ENGINES)),
    default="hf",
    show_default=True,
    help="What engines may do: what our hf workers, vLLM, or vLLM with our scheduler state today, "
    "or ideal: all that is designed, moves between workers included.",
)
@click.option(
    "--seats",
    type=Finite(min=0),
    default=SeatSettings().share,
    show_default=True,
    metavar="SHARE",
    help="Share of the workers' memory that sessions at work may fill, as in the gateway: a new"
    " session waits for room. 0: all are let in.",
)
@click.option(
    "--mode",
    default="closed",
    show_default=True,
    metavar="closed|open|capped:N",
    help="closed: a turn follows its predecessor's end and the tool; open: as recorded; "
    "capped:N: closed, N sessions at once.",
)
@click.option(
    "--sessions", type=SESSIONS, help="Only so many sessions (generated: so many).  [all]"
)
@click.option("--sample", is_flag=True, help="Draw them by the seed instead of the first ones.")
@click.option("--time-scale", type=FACTOR, default=1.0, help="Factor on arrivals.  [1]")
@click.option("--tool-scale", type=FACTOR, default=1.0, help="Factor on tool times; 0: none.  [1]")
@click.option(
    "--top-share", type=Finite(0, 1), help="Skew: the top 1 % hold this share of the input."
)
@click.option("--shared-heads", is_flag=True, help="Equal system prompts are one prefix.")
@click.option(
    "--generate",
    "workload",
    default="coding-agent",
    show_default=True,
    metavar="WORKLOAD",
    help=f"Without TRACE: {', '.join(WORKLOADS)}.",
)
@click.option(
    "--faults",
    metavar="SPEC|FILE.json",
    help="What breaks: death:w3@600+120 (worker 3 dies 600 s into the run, for 120 s), "
    "slow_disk:w1@300+60x10, link:w2@100+30, directory@500+60, drawn:5@0+3600 (5 by the seed).",
)
@click.option(
    "--fold",
    type=click.IntRange(1, FOLD_MAX),
    default=None,
    metavar="N",
    help="Decode steps in one event at most; 1 simulates every step.  [no limit: same results]",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of all draws.")
@runner_options
@click.option("--details", is_flag=True, help="Every metric, and latencies by execution mode.")
@json_option
def command(
    trace: Path | None, *, lists_paces: bool, json_target: str | None, **given: Any
) -> None:
    """Replay TRACE (or a generated workload) against router policies.

    The router, cache, planner, node and directory that decide are the ones that serve; engines,
    links and disks are modelled. The same trace, seed and version give the same bytes.

    Where turns were refused or failed the share, the reasons and the mend stand below the table;
    the exit code is 1 only when a policy served no turn at all.

    \b
    ownerserve simulate                                     a generated workload, six policies
    ownerserve simulate sessions.jsonl.zst --policy all --workers 16
    ownerserve simulate conversation_trace.jsonl.zst --mode open --policy ear,ownerserve
    ownerserve simulate sessions.jsonl.zst --pace deepseek-v4-pro@h200 --disk 2TiB --host 256GiB
    """
    console = console_for(json_target)
    if lists_paces:
        console.print("\n".join(paces()), highlight=False)
        return
    names = _policies(given["policies"], _setup("ownerserve", given).granted.actions)
    setups = {name: _setup(name, given) for name in names}
    loaded = _load(trace, given, console)
    result = _simulate(loaded, setups, given, console)
    requests = result.requests // len(setups)
    title = f"{loaded.name}: {requests:,} requests on {given['workers']} x {given['pace']}"
    console.print(summary_table(result.policies, escape(title)))
    if given["details"]:
        console.print(details_table(result.policies, "details"))
        console.print(modes_table(result.policies, "execution modes"))
    engine = next(iter(setups.values())).granted
    console.print(engine.words(), style="dim", highlight=False)
    _warn(console, unserved(result.policies))
    body = to_json(result)
    rate = body["requests_per_cpu_s"] or 0.0
    console.print(
        f"{result.cpu_s:.1f} CPU s, {rate:,.0f} requests a CPU second, digest {result.digest[:16]}",
        style="dim",
        highlight=False,
    )
    write_json(json_target, "simulate", body)
    if served_nothing(result.policies):
        sys.exit(1)


def _warn(console: Console, lines: list[str]) -> None:
    """Print the lines beside the table, so that they stand wherever the table does."""
    for line in lines:
        console.print(line, style="yellow", highlight=False)


def _policies(given: Sequence[str], offered: Collection[PlacementAction]) -> list[str]:
    """Return the policies that are named; `all` is all that workers who offer this can carry
    out."""
    names = [name.strip() for text in given for name in text.split(",")]
    if "all" in names:
        splits = PlacementAction.REMOTE_PREFILL in offered
        names = [name for name in ROUTING_POLICIES if splits or name not in PD]
    for name in names:
        if name not in ROUTING_POLICIES:
            raise InvalidInput(
                "--policy", f"{name!r}", f"use some of {', '.join(ROUTING_POLICIES)}"
            )
    return list(dict.fromkeys(names))


def _setup(policy: str, given: dict[str, Any]) -> SimSetup:
    workers = given["workers"]
    prefill = given["prefill_workers"]
    if policy in PD and not prefill:
        prefill = workers // 2
    return SimSetup(
        policy=policy,
        workers=workers,
        prefill_workers=prefill if policy in PD else 0,
        workers_per_host=given["workers_per_host"],
        gateways=given["gateways"],
        pace=given["pace"],
        kv_bytes=_size(given, "kv"),
        cache_policy=given["evict"],
        abilities=given["abilities"],
        seats=SeatSettings(share=given["seats"]) if given["seats"] else None,
        links=Links(nic_gb_s=given["nic"], pcie_gb_s=given["pcie"]),
        tiers=Tiers(
            host_bytes=_size(given, "host"),
            disk_bytes=_size(given, "disk"),
            remote_bytes=_size(given, "remote"),
            checkpoints=given["checkpoints"],
        ),
        shape=_shape(given),
        faults=_faults(given),
        longest_fold=FOLD_MAX if given["fold"] is None else given["fold"],
    )


def _faults(given: dict[str, Any]) -> tuple[Fault, ...]:
    if not given["faults"]:
        return ()
    workers = given["workers"]
    disks = workers if _size(given, "disk") else 0
    return read_faults(given["faults"], workers=workers, disks=disks, seed=given["seed"])


def _size(given: dict[str, Any], name: str) -> int:
    return parse_bytes(given[name], field=f"--{name}") if given[name] is not None else 0


def _shape(given: dict[str, Any]) -> WorkloadShape:
    count = given["sessions"]
    return WorkloadShape(
        mode=_mode(given["mode"]),
        sessions=None if count is None else (Sample if given["sample"] else First)(count),
        skew=None if given["top_share"] is None else TopShare(given["top_share"]),
        shared_heads=SharedHeads() if given["shared_heads"] else None,
        time_scale=given["time_scale"],
        tool_scale=given["tool_scale"],
        seed=given["seed"],
    )


def _mode(text: str) -> Closed | Open | Capped:
    name, _, lanes = text.partition(":")
    if name == "capped" and lanes.isdigit():
        return Capped(int(lanes))
    if text in ("closed", "open"):
        return Closed() if text == "closed" else Open()
    raise InvalidInput("--mode", f"{text!r}", "use closed, open or capped:N")


def _load(path: Path | None, given: dict[str, Any], console: Console) -> Trace:
    if path is not None:
        with console.status(f"reading {escape(path.name)}"):
            return read_trace(path)
    options = Options(sessions=given["sessions"] or 50, seed=given["seed"])
    with console.status(f"making {escape(given['workload'])}"):
        return generate(given["workload"], options)


def _simulate(
    trace: Trace, setups: dict[str, SimSetup], given: dict[str, Any], console: Console
) -> Simulated:
    found: dict[str, dict[str, Any]] = {}
    cpu_s, turns = 0.0, 0
    jobs = Jobs(trace, setups, metrics_of)
    runner = runner_of(given["jobs"], given["ray"])
    with _progress(console, f"{len(setups)} policies", PARTS * len(setups)) as advance:
        for outcome in run_all(jobs, runner=runner, progress=advance):
            found[outcome.name] = outcome.kept
            cpu_s, turns = cpu_s + outcome.cpu_s, turns + outcome.turns
    ordered: dict[str, Any] = {name: known(found[name]) for name in setups}
    told: dict[str, Any] = {
        "name": trace.name,
        "origin": trace.origin,
        "requests": trace.request_count,
        "sessions": len(trace.sessions),
        "block_tokens": trace.block_tokens,
        "shape": known(msgspec.to_builtins(next(iter(setups.values())).shape)),
    }
    engine = next(iter(setups.values())).granted.told()
    return Simulated(told, given["seed"], ordered, turns, cpu_s, digest(ordered), engine)


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Any]:
    """Yield a bar; it shows nothing when no terminal looks on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
