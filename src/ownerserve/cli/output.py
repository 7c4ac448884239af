"""This module prints for every command: a table for people, one JSON object for programs.

`--json PATH` writes the object beside the table, `--json -` prints it alone on stdout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

JSON_HELP = "Also write the result as one JSON object to PATH; '-' prints only that, on stdout."


class OutputFile(click.Path):
    """This kind takes a file that a command writes at its end: refused before any work when it
    can't be written."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if problem := _unwritable_file(str(value)):
            self.fail(problem, param, ctx)
        return Path(value)


class JsonTarget(OutputFile):
    """This kind takes where `--json` writes, as text: a file, or "-" for stdout."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "-" else str(super().convert(value, param, ctx))


class OutputFolder(click.Path):
    """This kind takes a folder that a command fills, made when it is missing.

    It is refused before any work when it can't be.
    """

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if problem := _unwritable_folder(str(value)):
            self.fail(problem, param, ctx)
        return Path(value)


def _unwritable_file(name: str) -> str | None:
    """Return what is wrong with writing a file of this name, and the mend; None when nothing is."""
    path = Path(name)
    try:
        if not name or path.is_dir():
            return f"{name!r} is a folder; name a file in it" if name else "no name; name a file"
        if not path.parent.is_dir():
            return f"{name!r} is in no folder; make {str(path.parent)!r} first"
        if path.exists():
            writable = _may(path, os.W_OK)
        else:
            writable = _may(path.parent, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        return f"{name[:80]!r}: {getattr(error, 'strerror', None) or error}; name another file"
    return None if writable else f"{name!r} can't be written; name another file"


def _unwritable_folder(name: str) -> str | None:
    """Return what is wrong with making files in a folder of this name, and the mend; None when
    nothing is."""
    path = Path(name)
    try:
        if not name:
            return "no name; name a folder"
        found = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not found.is_dir():
            return f"{str(found)!r} is a file; name a folder"
        writable = _may(found, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        return f"{name[:80]!r}: {getattr(error, 'strerror', None) or error}; name another folder"
    return None if writable else f"{str(found)!r} can't be written; name another folder"


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def json_option(command: F) -> F:
    """Add the `--json PATH|-` option, as parameter `json_target`."""
    return click.option(
        "--json", "json_target", metavar="PATH|-", type=JsonTarget(), help=JSON_HELP
    )(command)


def console_for(json_target: str | None) -> Console:
    """Return where tables go: stdout, or stderr when stdout is taken by `--json -`."""
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
