"""This module wires and prints `ownerserve demo --engine vllm`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from ownerserve.cli.demo.compare import Comparison, compare
from ownerserve.cli.demo.drive import TurnAnswer
from ownerserve.cli.demo.processes import terminate_as_interrupt
from ownerserve.cli.demo.vllm_processes import VllmSetup, find_python
from ownerserve.cli.demo.vllm_run import ALONE, WITH_US, Crash, run_engine, write_model
from ownerserve.cli.demo.workload import Conversation, Transcript
from ownerserve.cli.output import write_json
from ownerserve.report.demo_results import PolicyResult
from ownerserve.report.demo_table import engines_table
from ownerserve.trace.model import Trace

CONTEXTS_IN_POOL = 1
"""Sessions of full length that a worker's pool holds: fewer than it gets."""

MARGIN_TOKENS = 256
"""Over the longest context of the trace, for what the chat template adds."""


class VllmDemo(msgspec.Struct, frozen=True):
    """The demo's settings are what the command line said."""

    python: Path | None
    trace: Trace
    conversations: Sequence[Conversation]
    workers: int


def run_vllm_demo(console: Console, demo: VllmDemo, json_target: str | None) -> None:
    """Run both engines on one workload, then the crash; print and write what came of it."""
    python = find_python(demo.python)
    context = max(r.input_tokens + r.output_tokens for s in demo.trace.sessions for r in s.requests)
    results: dict[str, PolicyResult] = {}
    answers: dict[str, list[TurnAnswer]] = {}
    transcript: Transcript = {}
    crash: Crash | None = None
    with terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as place:
        model = write_model(Path(place) / "model")
        setup = VllmSetup(python, model, context + MARGIN_TOKENS, CONTEXTS_IN_POOL * context)
        console.print(
            f"{len(demo.conversations)} sessions, {demo.trace.request_count} requests of "
            f"{demo.trace.name}; {demo.workers} vLLM workers ({python}), a tiny random Qwen3, "
            f"{setup.pool_tokens:,} tokens of KV each"
        )
        for name in (WITH_US, ALONE):  # who runs last finds a machine that is warm
            console.print(f"{name}: starting workers; vLLM takes its time ...")
            results[name], answers[name], survived = run_engine(
                name,
                setup,
                demo.conversations,
                workers=demo.workers,
                transcript=transcript,
                on_turn=lambda answer: None,
            )
            crash = survived or crash
    results = {name: results[name] for name in (ALONE, WITH_US)}
    comparison = compare(answers[ALONE], answers[WITH_US])
    console.print(engines_table(results))
    console.print(_verdict(comparison))
    if crash is not None:
        console.print(crash.line())
    body = {
        "engine": "vllm",
        "policies": {name: [result] for name, result in results.items()},
        "answers_equal": comparison.equal,
        "comparisons": {WITH_US: [comparison]},
        "crash": crash,
        "workload": {"name": demo.trace.name, "requests": demo.trace.request_count},
        "workers": demo.workers,
    }
    write_json(json_target, "demo", msgspec.to_builtins(body))
    failed = [error for result in results.values() for error in result.first_errors]
    if failed or not comparison.equal:
        raise click.ClickException("; ".join(failed) or "the engines gave different answers")


def _verdict(comparison: Comparison) -> str:
    word = "equal" if comparison.equal else "DIFFERENT"
    return (
        f"answers with and without OwnerServe: {word} ({comparison.tokens_compared:,} tokens, "
        f"largest logprob difference {comparison.max_logprob_difference:.1e}, "
        f"{len(comparison.flips)} argmax flips, {comparison.missing} missing)"
    )
