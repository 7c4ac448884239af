"""This module is the `ownerserve` command. A subcommand's module is imported only when it runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from ownerserve import __version__
from ownerserve.cli.failures import REPORT, told

DEFECT = 70
"""Exit code for a defect of ours (EX_SOFTWARE of sysexits.h)."""
AGAIN_S = 0.05
"""A Ctrl-C that was dropped comes again after this."""

# name -> (module that defines `command`, one-line help shown without importing it)
COMMANDS = {
    "demo": ("demo", "Gateway + two workers + an agent workload, end to end."),
    "inspect": ("inspect", "What state a model keeps, bytes per component, sessions that fit."),
    "trace": ("trace", "Read, measure and make workloads."),
    "store": ("store", "Look into, check, clean and measure the artifact store."),
    "plan": ("plan", "Price a restore or a placement, and explain it."),
    "worker": ("worker", "The reference engine as an OpenAI-compatible server."),
    "gateway": ("gateway", "The router in front of workers."),
    "simulate": (
        "simulation.simulate",
        "Policies on a trace, without a GPU: what would each have done?",
    ),
    "evaluate": (
        "simulation.evaluate",
        "Every claim of the seeds, tested on traces, in one report.",
    ),
    "directory": ("directory.command", "Who owns a session, who holds a prefix."),
    "transfer": ("transfer.command", "Which roads KV can take from here, and how fast they are."),
    "doctor": ("doctor", "What is installed, reachable, misconfigured, and the mend."),
}


class LazyGroup(click.Group):
    """The group's commands live in modules named in COMMANDS, each imported when it is asked
    for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ownerserve.cli.{COMMANDS[cmd_name][0]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ownerserve")
def cli() -> None:
    """Serve long-context agents: where KV state lives, how it comes back, where turns run.

    \b
    ownerserve demo                                     see it work on this machine
    ownerserve inspect CONFIG.json --hbm 96GiB          what a model's state costs
    ownerserve trace stats SESSIONS.jsonl.zst           what a workload re-uses
    ownerserve COMMAND --help                           one command, with examples
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default the one of this process, and exit.

    Exit codes: 1 or 2 after one line that says what to mend, 130 after Ctrl-C, 70 for a defect of
    ours, which keeps its traceback.
    """
    try:
        with every_interrupt():
            cli.main(arguments, prog_name="ownerserve", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"error: {_one_line(error)}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the root of the process
        sys.exit(_told(error))


@contextmanager
def every_interrupt() -> Iterator[None]:
    """Let no Ctrl-C be lost: where Python drops it, as one that comes amid a finalizer or a fork's
    hook, it is sent again."""
    former = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            former(unraisable)
            return
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = former


def _one_line(error: click.ClickException) -> str:
    """Return what click found wrong, and for the use of a command where that is taught."""
    line = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{line}; see `{error.ctx.command_path} --help`"
    return line


def _told(error: Exception) -> int:
    """Print what went wrong and return the exit code."""
    line = told(error)
    if line is None or os.environ.get("OWNERSERVE_LOG", "").lower() == "debug":
        traceback.print_exception(error)
    click.echo(REPORT if line is None else f"error: {line}", err=True)
    return DEFECT if line is None else 2


if __name__ == "__main__":
    main()
