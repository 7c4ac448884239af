"""How every command prints: a table for people, one JSON object for programs.

`--json PATH` writes the object beside the table, `--json -` prints it alone on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

JSON_HELP = "Also write the result as one JSON object to PATH; '-' prints only that, on stdout."


def json_option(command: F) -> F:
    """The `--json PATH|-` option, as parameter `json_target`."""
    return click.option("--json", "json_target", metavar="PATH|-", help=JSON_HELP)(command)


def console_for(json_target: str | None) -> Console:
    """Where tables go: stdout, or stderr when stdout is taken by `--json -`."""
    return Console(stderr=json_target == "-")


def write_json(json_target: str | None, command: str, body: Mapping[str, Any]) -> None:
    """Write `body` under schema `ownerserve.<command>/1`; nothing when no target was given."""
    if json_target is None:
        return
    document = {"schema": f"ownerserve.{command}/1", **body}
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    if json_target == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        Path(json_target).write_bytes(text)
