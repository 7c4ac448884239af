"""`ownerserve gateway --config FILE`: one TOML file has the gateway's options by their names.

    port = 8000
    policy = "ownerserve"
    tenants-file = "tenants.toml"       # a path is relative to this file's folder

    [[worker]]
    url = "http://127.0.0.1:8001"
    models = ["qwen3"]                  # as --worker URL=MODEL[,MODEL]
    role = "prefill"                    # as --worker prefill+URL
    arm = "main"                        # or "canary", as --worker URL#canary

Owns nothing but the reading: what it reads becomes click's defaults, so that the command line wins
and each option's own check is made of the file's values too. Every error names the file and the
key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import click

from ownerserve.gateway.http.access import parse_role, parse_worker
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.messages import Arm

F = TypeVar("F", bound=Callable[..., Any])
FORM = "see examples/gateway.toml and docs/gateway.md for its form"
WORKER = "worker"
FILE_BYTES_MAX = 4 << 20
_NO_SETTINGS = frozenset({"config", "check", "help"})
"""Options that say what a command does, and are no setting of a gateway."""


def settings_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command that its file may have, by their names in kebab-case."""
    options = (one for one in command.params if isinstance(one, click.Option))
    named = {opt[2:]: one for one in options for opt in one.opts if opt.startswith("--")}
    return {name: one for name, one in named.items() if name not in _NO_SETTINGS}


def config_option(command: F) -> F:
    """Give a command `--config FILE`, whose values are the defaults of its other options."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_take_defaults,
        help="TOML: these options by their names, workers as [[worker]] tables with url and models"
        " (examples/gateway.toml). What is said here on the command line wins.",
    )(command)


def _take_defaults(ctx: click.Context, option: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.default_map = read_gateway_file(value, ctx)


def read_gateway_file(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the file's values by the names of the parameters of `ctx`'s command. Raises
    InvalidInput, which names file, key and mend."""
    options, found, said = settings_of(ctx.command), dict[str, Any](), dict[str, str]()
    for key, value in _read(path).items():
        name = key.replace("_", "-")
        field = f"{path}: {key}"
        if name not in options:
            raise InvalidInput(field, "is no option of the gateway", _nearest(name, options))
        if name in said:
            raise InvalidInput(field, f"is said before, as {said[name]}", "say it once")
        said[name] = key
        option = options[name]
        assert option.name is not None
        if name == WORKER:
            found[option.name] = _workers(value, path)
        else:
            found[option.name] = _value(value, option, ctx, field=field, folder=path.parent)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        raise InvalidInput("--config", problem, "name a readable TOML file") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput("--config", f"{path} is over {FILE_BYTES_MAX} bytes", FORM)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        problem = f"{path}: no TOML: {error}"
        raise InvalidInput("--config", problem, FORM) from error


def _nearest(name: str, options: dict[str, click.Option]) -> str:
    """Return the mend for a name that is no option."""
    if name in _NO_SETTINGS:
        return f"give --{name} on the command line"
    if name == "workers":
        return "write each worker as a [[worker]] table"
    near = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {near[0]}?" if near else "`ownerserve gateway --help` lists all"


def _value(
    value: Any, option: click.Option, ctx: click.Context, *, field: str, folder: Path
) -> Any:
    """Return an option's value, checked as the command line's is, and by TOML's type besides."""
    if option.multiple and isinstance(value, list):
        return [_value(one, _single(option), ctx, field=field, folder=folder) for one in value]
    kind, named = _toml_type(option)
    if not isinstance(value, kind) or (isinstance(value, bool) and not option.is_flag):
        raise InvalidInput(field, f"is {_shown(value)}", f"write {named}")
    if isinstance(option.type, click.Path):
        value = str(folder / str(value))
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise InvalidInput(field, error.message.rstrip("."), "mend it in the file") from error
    return value


def _toml_type(option: click.Option) -> tuple[type | tuple[type, ...], str]:
    """Return which types a value may have in TOML, and their name for people."""
    if option.multiple:
        return (), "a list of strings"
    if option.is_flag:
        return bool, "true or false"
    if isinstance(option.type, click.types.IntParamType):
        return int, "a whole number"
    if isinstance(option.type, click.types.FloatParamType):
        return (int, float), "a number"
    return str, "a string"


def _single(option: click.Option) -> click.Option:
    """Return the option as it would be if it could be given once."""
    one = copy(option)
    one.multiple = False
    return one


def _shown(value: Any) -> str:
    """Return a wrong value as the file has it, or what it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)):
        return repr(value)[:80]
    return "a table" if isinstance(value, dict) else "a list or a date"


def _workers(tables: Any, path: Path) -> list[str]:
    """Return the workers as --worker takes them."""
    field = f"{path}: {WORKER}"
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        problem = "is no list of tables"
        raise InvalidInput(field, problem, 'write [[worker]], and below it url = "http://..."')
    words = [_worker(table, f"{field}[{number}]") for number, table in enumerate(tables)]
    places = [parse_worker(word).worker for word in words]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise InvalidInput(f"{field}[{number}].url", f"{place} is given twice", "give it once")
    return words


def _worker(table: dict[str, Any], field: str) -> str:
    for key in table:
        if key not in ("url", "models", "role", "arm"):
            mend = (
                "a worker has url, models, role, arm; the gateway's options stand above all"
                " [[worker]]"
            )
            raise InvalidInput(f"{field}.{key}", "is nothing that a worker has", mend)
    url, models = table.get("url"), table.get("models", [])
    arm = table.get("arm", Arm.MAIN)
    if arm not in tuple(Arm):
        raise InvalidInput(f"{field}.arm", f"is {_shown(arm)}", 'write arm = "canary", or "main"')
    if not isinstance(url, str) or "=" in url or "#" in url:
        problem = "is missing" if url is None else "is no URL"
        raise InvalidInput(f"{field}.url", problem, 'write url = "http://127.0.0.1:8001"')
    if not isinstance(models, list) or not all(_is_name(one) for one in models):
        problem = "is no list of models' names"
        raise InvalidInput(f"{field}.models", problem, 'write models = ["model-a", "model-b"]')
    place = url if arm == Arm.MAIN else f"{url}#{arm}"
    word = f"{place}={','.join(models)}" if models else place
    if "role" in table:
        try:
            word = f"{parse_role(str(table['role']))}+{word}"
        except InvalidInput as error:
            raise InvalidInput(f"{field}.role", error.problem, error.mend) from error
    try:
        parse_worker(word)
    except InvalidInput as error:
        raise InvalidInput(f"{field}.url", error.problem, error.mend) from error
    return word


def _is_name(model: Any) -> bool:
    return isinstance(model, str) and re.fullmatch(r"[^,]*\S[^,]*", model) is not None
