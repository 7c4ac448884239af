"""A gateway's settings come from its command line and file, at its start and at each reload.

Owns nothing but the reading. `read_again` parses the same words as at the start, so that the file
and the files that it names are read anew, and every check is made as then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from ownerserve.cli.directory.embedded import embedded_at
from ownerserve.cli.gateway_network import network_settings
from ownerserve.cli.options import check_host, fleet_key
from ownerserve.gateway.config import Config, PrefillLegs, StreamUsage
from ownerserve.gateway.http.access import parse_worker, read_key
from ownerserve.gateway.http.callers import KeyedCallers
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.rollout.reloading import ReadSettings
from ownerserve.gateway.tenants import read_tenants
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from ownerserve.router.rollout.steering import Mode
from ownerserve.router.settings import DEFAULTS, by_hand
from ownerserve.router.worker import DEFAULT_SPEED, Speed

LOG = "ownerserve.gateway.log"
"""Where a command's context has the options of its log, and whether it only checks."""
_WORDS = "ownerserve.gateway.words"
OPENING_S = 5.0


class RereadCommand(click.Command):
    """A reread command remembers the words that it was called with."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **more: Any,
    ) -> click.Context:
        words = tuple(args)
        context = super().make_context(info_name, args, parent, **more)
        context.meta[_WORDS] = words
        return context


def words_of(context: click.Context) -> tuple[str, ...]:
    """Return the words that the command of this context was called with."""
    words: tuple[str, ...] = context.meta[_WORDS]
    return words


def read_again(command: click.Command, words: Sequence[str]) -> ReadSettings:
    """Return what these words, and the files that they name, say now. Raises InvalidInput."""
    try:
        context = command.make_context(command.name, list(words))
        with context:
            return read_settings(context)
    except click.UsageError as error:
        option = getattr(error, "param", None)
        field = "options" if option is None else max(option.opts, key=len)
        raise InvalidInput(field, error.format_message().rstrip("."), "mend it") from error


def read_settings(context: click.Context) -> ReadSettings:
    """Return what the command of this context, the present one, was told. Raises InvalidInput."""
    said = dict(context.params)
    check_host(said["host"])
    check_host(said["admin_host"], field="--admin-host")
    log = context.meta[LOG]
    made = _made(said) | network_settings() | {"access_log": log["access_log"]}
    as_said = {name: said[name] for name in Config.__struct_fields__ if name in said}
    config = Config(**(as_said | made))
    beside = {name: said[name] for name in ("directory", "processes")}
    beside |= {"log-format": log["log_format"]}
    return ReadSettings(config, log["log_level"], beside)


def _made(said: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Config that options say in another form."""
    tenants_file, seats, token_ms = said["tenants_file"], said["seats"], said["token_ms"]
    return {
        "workers": tuple(parse_worker(url) for url in said["workers"]),
        "mode": Mode(said["mode"]),
        "tenants": None if tenants_file is None else _tenants(tenants_file),
        "admin_key": _key(said["admin_key_file"], "--admin-key-file"),
        "receipts": ReceiptForm(said["receipts"]),
        "stream_usage": StreamUsage(said["stream_usage"]),
        "prefill_legs": PrefillLegs(said["prefill_legs"]),
        "opening_s": _opening_s(said["opening_s"], said["directory"]),
        "bodies_max_bytes": said["body_memory_mib"] * MIB,
        "settings": by_hand(
            replace(DEFAULTS, long_tokens=said["long_tokens"]),
            hot_ms=said["hot_ms"],
            cool_s=said["cool_s"],
        ),
        "seats": SeatSettings(share=seats) if seats else None,
        "queue": QueueSettings(
            running_max=said["max_running"],
            waiting_max=said["max_waiting"],
            wait_s=said["queue_wait_s"],
        ),
        "worker_key": _key(said["worker_key_file"], "--worker-key-file"),
        "fleet_key": fleet_key(said["curve_key_file"]),
        "speed": DEFAULT_SPEED if token_ms is None else _speed(token_ms),
    }


def _tenants(path: Path) -> KeyedCallers:
    """Read the tenants file. Raises InvalidInput, which names it."""
    try:
        return read_tenants(path)
    except InvalidInput as error:
        problem = error.problem if str(path) in error.problem else f"{error.problem}, in {path}"
        raise InvalidInput(error.field, problem, error.mend) from error


def _opening_s(given: float | None, directory: str | None) -> float:
    """Return how long the opening window is: a gateway alone needs none."""
    if given is not None:
        return given
    return 0.0 if directory is None or embedded_at(directory) is not None else OPENING_S


def _key(path: Path | None, option: str) -> str | None:
    return None if path is None else read_key(path, field=option)


def _speed(token_ms: float) -> Speed:
    """Return the speed of a worker whose prefill takes so many ms a token, and all else in
    proportion."""
    prefill = DEFAULT_SPEED.prefill
    return replace(DEFAULT_SPEED, prefill=prefill.scaled(token_ms / prefill.b_ms))
