"""The gateway's settings: each once, with its unit and default."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.units import KIB, MIB
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.router.seats import SeatSettings
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import DEFAULT_SPEED, Speed


class Address(msgspec.Struct, frozen=True):
    """Where a worker listens. Its id is "host:port".

    `models`: what it serves, by its operator's word; none: what it says itself.
    """

    host: str
    port: int
    scheme: str = "http"
    models: tuple[str, ...] = ()

    @property
    def worker(self) -> WorkerId:
        return WorkerId(f"{self.host}:{self.port}")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway."""

    workers: tuple[Address, ...]
    policy: str = "ownerserve"
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    admin_port: int = 0
    head_max_bytes: int = 64 * KIB
    body_max_bytes: int = 32 * MIB
    """A request body is held once, whole: it is scanned, and kept until the first byte returns."""
    connect_timeout_s: float = 3.0
    head_timeout_s: float = 30.0
    body_timeout_s: float = 300.0
    idle_timeout_s: float = 75.0
    """A kept connection without a request is closed after this."""
    drain_timeout_s: float = 30.0
    health_interval_s: float = 1.0
    health_timeout_s: float = 3.0
    decisions_kept: int = 1000
    settings: Settings = DEFAULTS
    seats: SeatSettings | None = None
    """How many sessions may run at once; None: all that come."""
    speed: Speed = DEFAULT_SPEED
    """The speed by which workers are priced that do not state theirs."""
    worker_key: str | None = None
    """Presented to the workers, in place of a client's own; None: the client's own goes through."""
    worker_ca_file: Path | None = None
    """Certificates that are believed of https workers beside the system's."""
    fleet_key: FleetKey | None = None
    """The keys that workers' RPC ports want off loopback; None: those are not asked."""

    def __repr__(self) -> str:
        """All but the worker key, which belongs in no log."""
        names = (name for name in self.__struct_fields__ if name != "worker_key")
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def parse_worker(url: str) -> Address:
    """The address in "http://host:port" or "https://host:port", with the models that the operator
    says it serves after "=": "http://host:port=model-a,model-b". Raises InvalidInput."""
    mend = "write it like http://127.0.0.1:8001, or http://127.0.0.1:8001=model-a,model-b"
    place, assigned, names = url.partition("=")
    models = tuple(name.strip() for name in names.split(","))
    if assigned and not all(models):
        raise InvalidInput("worker", f"{url!r} assigns no model", mend)
    try:
        parts = urlsplit(place)
        port = parts.port
    except ValueError as error:
        raise InvalidInput("worker", f"{url!r}: {error}", mend) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise InvalidInput("worker", f"{url!r} is no http or https URL with a port", mend)
    if parts.path not in ("", "/") or parts.query:
        raise InvalidInput("worker", f"{url!r} has a path", mend)
    _check_host(place, parts.hostname, port)
    return Address(parts.hostname, port, parts.scheme, models if assigned else ())


def _check_host(place: str, host: str, port: int) -> None:
    """Raises InvalidInput for a host that no look-up takes: it would be asked for for ever."""
    mend = "write it like http://127.0.0.1:8001"
    if not place.isprintable() or " " in place:
        raise InvalidInput("worker", f"{place[:80]!r}: its host has a space or control in it", mend)
    try:
        name = host.encode("idna").decode("ascii")
    except UnicodeError as error:
        problem = f"{place[:80]!r}: its host has an empty part, or one over 63 characters"
        raise InvalidInput("worker", problem, mend) from error
    named = f"[{name.partition('%')[0]}]" if ":" in name else name
    parse_address(f"{named}:{port}", field="worker", mend=mend)
