"""This module has the kinds of option values that several commands take; a wrong one is refused
before any work."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ownerserve.kv.errors import InvalidInput

if TYPE_CHECKING:
    from ownerserve.kv.wire.curve import FleetKey

PORT = click.IntRange(0, 65535)


class Finite(click.FloatRange):
    """This kind takes a number in a range. It refuses nan and infinite, which compare with no limit
    as one expects."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return float(super().convert(number, param, ctx))


class DelayMs(click.types.StringParamType):
    """This kind takes milliseconds, a minute at most, or `none`, which is None to the command:
    never."""

    name = "milliseconds"
    _MS = Finite(min=0, max=60_000)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or None."""
        return None if value == "none" else self._MS.convert(value, param, ctx)


class Count(click.types.StringParamType):
    """This kind takes parameters of a model, as 3.3B, 700M or a plain number; a float to the
    command."""

    name = "count"
    _FACTORS: ClassVar = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        factor = self._FACTORS.get(text[-1:].upper(), 1.0)
        try:
            count = float(text if factor == 1.0 else text[:-1]) * factor
        except ValueError:
            count = math.nan
        if not 0 < count < 1e18:
            field = param.opts[-1] if param is not None else self.name
            raise InvalidInput(field, f"{text[:80]!r} is no count", "write it like 3.3B or 22e9")
        return count


def check_host(host: str, *, field: str = "--host") -> None:
    """Raise InvalidInput when `host` is no address to listen on."""
    try:
        if not host:
            raise OSError("no name")
        socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        problem = f"{host[:80]!r}: {getattr(error, 'strerror', None) or error}"
        mend = "use an address of this machine, like 127.0.0.1"
        raise InvalidInput(field, problem, mend) from error


curve_key_option = click.option(
    "--curve-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The fleet's keys, made by `ownerserve directory keys`: what its processes say to each"
    " other off loopback needs them.",
)


def fleet_key(path: Path | None) -> FleetKey | None:
    """Read the keys of `curve_key_option`. Raises InvalidInput."""
    if path is None:
        return None
    from ownerserve.kv.wire.curve import read_fleet_key

    return read_fleet_key(path)


SEED = click.IntRange(0, 2**63 - 1)
SESSIONS = click.IntRange(1, 10_000_000)
GPU_COUNT = click.IntRange(1, 1024)
FACTOR = Finite(0, 1e6)
"""What durations of a trace are multiplied by."""
