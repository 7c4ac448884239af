"""The `doctor` command says which checks run, and how they are printed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
import msgspec

from ownerserve import __version__
from ownerserve.cli.doctor import engine, machine
from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.engines.vllm.flags import EVENTS_ENDPOINT, SERVER_MODULE, Serve, serve
from ownerserve.report.doctor_table import CheckResult, Level, show, to_json, worst

PYTHON_HELP = "The Python that the engine is installed in. Default: this one."
STORE_HELP = "Directory of the artifact store."


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--store", type=click.Path(path_type=Path), help=STORE_HELP)
@click.option("--redis", metavar="URL", help="A directory's Redis or Valkey: is it reachable?")
@json_option
@click.pass_context
def command(
    context: click.Context, store: Path | None, redis: str | None, json_target: str | None
) -> None:
    """Check what is installed, reachable, misconfigured; say the mend.

    \b
    ownerserve doctor                                         this machine
    ownerserve doctor --store /data/kv --redis redis://h:6379
    ownerserve doctor vllm --model DIR --store DIR            and the flags of `vllm serve`

    Exit code 0: nothing fails; 1: something does.
    """
    if context.invoked_subcommand is not None:
        return
    findings = [
        CheckResult("ownerserve", Level.OK, __version__),
        machine.python(),
        *_machine(store),
    ]
    if redis is not None:
        findings.append(machine.redis(redis))
    _finish(findings, json_target)


@command.command("vllm")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="A checkpoint.")
@click.option("--store", type=click.Path(path_type=Path), required=True, help=STORE_HELP)
@click.option("--python", "python_path", type=click.Path(path_type=Path), help=PYTHON_HELP)
@click.option(
    "--events",
    metavar="ENDPOINT",
    help=f"Also publish KV events; {EVENTS_ENDPOINT} binds port 5557.",
)
@click.option(
    "--kv-transfer-config",
    "transfer",
    metavar="JSON|FILE",
    help="Check the one you use instead of trusting the printed one.",
)
@click.option(
    "--hash-algo", default="sha256", show_default=True, help="vLLM's --prefix-caching-hash-algo."
)
@json_option
def vllm(
    model: Path,
    store: Path,
    python_path: Path | None,
    events: str | None,
    transfer: str | None,
    hash_algo: str,
    json_target: str | None,
) -> None:
    """Check a vLLM installation and print the flags it is to be started with.

    \b
    ownerserve doctor vllm --model /models/qwen3 --store /data/kv
    ownerserve doctor vllm --model DIR --store DIR --python /opt/vllm/bin/python
    ownerserve doctor vllm --model DIR --store DIR --kv-transfer-config mine.json
    """
    python = python_path or Path(sys.executable)
    asked = engine.ask(python)
    is_model, config = engine.model(model)
    findings = [
        CheckResult("engine's python", Level.OK, f"{asked.python} at {python}"),
        *engine.installed(python, asked),
        is_model,
        *([engine.kept(config)] if config is not None else []),
        *_machine(store),
        *engine.environment(asked),
        engine.block_hash(hash_algo, asked),
    ]
    if events is not None:
        findings.append(engine.events(events))
    if transfer is not None:
        findings += engine.transfer(transfer)
    plan = serve(
        str(model),
        str(store.absolute()),
        config=config,
        events=events or "",
        known=asked.flags,
    )
    _finish(findings, json_target, plan=plan, launcher=_launcher(python, asked))


def _machine(store: Path | None) -> list[CheckResult]:
    findings = [
        machine.memory(),
        machine.shared_memory(),
        machine.roads(),
        machine.open_files(),
    ]
    return findings + (list(machine.store(store)) if store is not None else [])


def _launcher(python: Path, asked: engine.EnginePython) -> str:
    """Return what starts a server there, by its shortest name."""
    if not asked.has_command:
        return f"{python} -m {SERVER_MODULE} --model"
    beside = python.parent / "vllm"
    if not beside.exists() or shutil.which("vllm") == str(beside):
        return "vllm serve"
    return f"{beside} serve"


def _finish(
    findings: list[CheckResult],
    json_target: str | None,
    *,
    plan: Serve | None = None,
    launcher: str = "",
) -> None:
    console = console_for(json_target)
    body = to_json(findings)
    if json_target != "-":
        show(findings, console)
    if plan is not None:
        body["serve"] = {**msgspec.to_builtins(plan), "command": plan.shell(launcher)}
        if json_target != "-":
            console.print()
            print(plan.shell(launcher))  # not by rich: it must survive copy and paste
            console.print()
            for note in plan.notes:
                console.print(f"  {note}", markup=False, highlight=False)
    write_json(json_target, "doctor", body)
    if worst(findings) is Level.FAIL:
        sys.exit(1)
