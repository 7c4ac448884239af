"""This module wires and prints `ownerserve demo` over workers of the reference engine: policies in
rounds, then a hot spot and a worker that leaves, then a session that outlives its worker.

Owns what came of all runs. Counts are shown first, since no clock decides them; then times.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ownerserve.cli.demo.cold_resume import ColdResume, cold_resume
from ownerserve.cli.demo.compare import Comparison, compare
from ownerserve.cli.demo.drive import TurnAnswer
from ownerserve.cli.demo.fleets import run_of
from ownerserve.cli.demo.hot_spot import HotSpot, hot_spot
from ownerserve.cli.demo.machine import load_average
from ownerserve.cli.demo.processes import terminate_as_interrupt
from ownerserve.cli.demo.rounds import OURS, rounds_of
from ownerserve.cli.demo.run import DemoSetup, run_policy
from ownerserve.cli.demo.workload import Transcript
from ownerserve.cli.output import write_json
from ownerserve.report.demo_machine import MachineLoad
from ownerserve.report.demo_results import PolicyResult
from ownerserve.report.demo_table import (
    COUNTS_NOTE,
    counts_table,
    detail_table,
    heat_line,
    times_note,
    times_of,
    times_table,
)
from ownerserve.trace.model import Trace

HEAT_POLICIES = ("ear", "ownerserve")
"""The policies that move sessions away from hot workers."""

DETAILED_MAX = 3
"""Policies side by side in the long table; of more, the first and ours, or the last (--json has
all)."""

STEADY_S = 3600.0
"""The bar reckons how long is left by all turns until now: workers that start are in it."""


class HfDemo(msgspec.Struct, frozen=True):
    """The demo's settings are what the command line said."""

    setup: DemoSetup
    trace: Trace
    policies: tuple[str, ...]
    repeats: int
    context: int
    seed: int


class Ran(msgspec.Struct):
    """What ran: of each policy its runs' results and answers, in the order in which they came, and
    the share of the machine's CPU that others took in each run, of all policies."""

    results: dict[str, list[PolicyResult]]
    answers: dict[str, list[list[TurnAnswer]]]
    others_cpu_shares: list[float | None] = []

    def comparisons(self) -> dict[str, list[Comparison]]:
        """Compare the answers of each run with those of the first."""
        first = next(iter(self.answers))
        reference = self.answers[first][0]
        return {
            name: [compare(reference, other) for other in runs[name == first :]]
            for name, runs in self.answers.items()
        }


def run_hf_demo(console: Console, demo: HfDemo, json_target: str | None) -> None:
    """Run every policy in rounds, then the cold resume; print and write what came of it."""
    rounds = rounds_of(demo.policies, demo.repeats)
    load, cores = load_average(), os.cpu_count() or 1
    _announce(console, demo, rounds)
    ran = _run_all(console, demo, rounds)
    machine = MachineLoad(cores, load, tuple(ran.others_cpu_shares))
    comparisons = ran.comparisons()
    _show(console, ran.results, comparisons, machine)
    spots = _hot_spots(console, demo)
    resumed = _resume(console, demo)
    compared = [one for runs in comparisons.values() for one in runs]
    equal = all(one.equal for one in (*compared, *(spot.compared for spot in spots)))
    body = {
        "policies": ran.results,
        "times": {name: times_of(runs) for name, runs in ran.results.items()},
        "rounds": rounds,
        "machine": {**msgspec.structs.asdict(machine), "warning": machine.warning},
        "answers_equal": equal,
        "comparisons": comparisons,
        "hot_spots": spots,
        "cold_resume": resumed,
        "workload": {
            "name": demo.trace.name,
            "seed": demo.seed,
            "requests": demo.trace.request_count,
        },
        "model": demo.setup.model,
        "workers": demo.setup.workers,
    }
    write_json(json_target, "demo", msgspec.to_builtins(body))
    failed = [e for runs in ran.results.values() for run in runs for e in run.first_errors]
    failed += [error for spot in spots for error in spot.errors]
    if failed or not equal:
        raise click.ClickException("; ".join(failed) or "policies gave different answers")


def _announce(console: Console, demo: HfDemo, rounds: Sequence[Sequence[str]]) -> None:
    trace, setup = demo.trace, demo.setup
    runs = sum(map(len, rounds))
    console.print(
        f"{len(setup.conversations)} sessions, {trace.request_count} requests, "
        f"{trace.input_tokens:,} prompt tokens of {escape(trace.name)}; {setup.workers} workers of "
        f"{escape(setup.model)}"
    )
    console.print(
        f"{runs} runs, each on workers of its own: {', '.join(rounds[0])}"
        + (f"; then in other orders, {len(rounds)} times in all" if len(rounds) > 1 else "")
    )


def _run_all(console: Console, demo: HfDemo, rounds: Sequence[Sequence[str]]) -> Ran:
    """Run every policy once in each round, under one bar of all turns."""
    names = dict.fromkeys(demo.policies)
    ran = Ran({name: [] for name in names}, {name: [] for name in names})
    runs = {name: run_of(name, demo.setup.workers) for name in names}
    transcript: Transcript = {}
    with terminate_as_interrupt(), _progress(console) as bar:
        task = bar.add_task("", total=demo.trace.request_count * sum(map(len, rounds)))

        def advance(answer: TurnAnswer) -> None:
            bar.advance(task)

        for number, order in enumerate(rounds, 1):
            for name in order:
                bar.update(task, description=f"round {number} of {len(rounds)}: {name}")
                result, answers = run_policy(runs[name], demo.setup, transcript, on_turn=advance)
                ran.results[name].append(result)
                ran.answers[name].append(answers)
                ran.others_cpu_shares.append(result.others_cpu_share)
    return ran


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    left = (TextColumn("turns,"), TimeElapsedColumn(), TextColumn("gone, left"))
    return Progress(
        *columns, *left, TimeRemainingColumn(), console=console, speed_estimate_period=STEADY_S
    )


def _show(
    console: Console,
    results: Mapping[str, Sequence[PolicyResult]],
    comparisons: Mapping[str, Sequence[Comparison]],
    machine: MachineLoad,
) -> None:
    """Print the counts of all policies, then their times, then some policies' first runs whole."""
    names = list(results)
    equal = {name: _equal(compared) for name, compared in comparisons.items()}
    console.print(counts_table(results, equal=equal))
    console.print(COUNTS_NOTE, highlight=False)
    for name in HEAT_POLICIES:
        if name in results:
            console.print(heat_line(name, results[name]), highlight=False)
    for name, compared in comparisons.items():
        if compared:
            console.print(verdict(names[0], name, compared), highlight=False)
    console.print()
    if machine.warning is not None:
        console.print(machine.warning, style="bold", highlight=False)
    reference = next((name for name in names if name not in OURS), names[0])
    console.print(times_table(results, reference=reference, machine=machine))
    console.print(times_note(results), highlight=False)
    console.print()
    shown = names
    if len(names) > DETAILED_MAX:
        shown = [names[0], OURS[0] if OURS[0] in names[1:] else names[-1]]
    console.print(detail_table("A first run in detail", {name: results[name][0] for name in shown}))


def _equal(compared: Sequence[Comparison]) -> str:
    """Say in one word whether all of a policy's runs gave the first run's answers."""
    if not compared:
        return "-"
    return "yes" if all(one.equal for one in compared) else "NO"


def verdict(reference: str, name: str, compared: Sequence[Comparison]) -> str:
    """Say how the answers of a policy's runs stand to those of the first run, of `reference`."""
    flips = [flip for one in compared for flip in one.flips]
    word = "equal" if all(one.equal for one in compared) else "DIFFERENT"
    whose = f"{name} and {reference}" if name != reference else f"{name} and {name} again"
    largest = max(one.max_logprob_difference for one in compared)
    lines = [
        f"answers of {whose}: {word} "
        f"({sum(one.tokens_compared for one in compared):,} tokens, largest logprob difference "
        f"{largest:.1e}, {len(flips)} argmax flips, "
        f"{sum(one.missing for one in compared)} missing)"
    ]
    lines += [
        f"  flip in {flip.session} turn {flip.turn} at token {flip.position}, "
        f"margin {flip.margin:.1e}"
        for flip in flips[:5]
    ]
    return "\n".join(lines)


def _hot_spots(console: Console, demo: HfDemo) -> list[HotSpot]:
    """Play the hot spot by each policy that moves sessions for heat, of those that were run."""
    policies = [name for name in HEAT_POLICIES if name in demo.policies]
    spots = list[HotSpot]()
    if demo.setup.workers < 2 or not policies:
        return spots
    console.print("a worker has too many sessions, then leaves amid an answer ...")
    with terminate_as_interrupt():
        for name in policies:
            spots.append(hot_spot(name, model=demo.setup.model, workers=demo.setup.workers))
            console.print("\n".join(spots[-1].lines()), highlight=False)
    return spots


def _resume(console: Console, demo: HfDemo) -> ColdResume:
    console.print("a session outlives its worker ...")
    with terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as folder:
        resumed = cold_resume(Path(folder), model=demo.setup.model, context=demo.context)
    console.print("\n".join(resumed.lines()))
    return resumed
