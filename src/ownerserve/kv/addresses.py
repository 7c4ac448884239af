"""Addresses are read as people write them, "host:port", and checked before anything connects."""

from __future__ import annotations

import ipaddress
import re

from ownerserve.kv.errors import InvalidInput

_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]")
_PORT = re.compile(r"[0-9]{1,5}")
LAST_PORT = 65535
KEYED, PLAIN = "curve://", "tcp://"
"""What an address of ours begins with: it wants the fleet's keys (kv/wire/curve.py), or it does
not."""
EVERYWHERE = ("0.0.0.0", "::", "[::]")
"""Hosts that stand for all addresses of a machine: nobody else reaches it by these."""


def parse_address(text: str, *, field: str, mend: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises InvalidInput naming `field`, with `mend`."""
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port):
        raise InvalidInput(field, f"{text[:80]!r} is no HOST:PORT", mend)
    if not 0 < int(port) <= LAST_PORT:
        raise InvalidInput(field, f"there is no port {port}", mend)
    return host, int(port)


def parse_endpoint(address: str, *, field: str, mend: str) -> tuple[str, int]:
    """Return host and port of "tcp://host:port" or "curve://host:port". Raises as
    `parse_address`.
    """
    for scheme in (KEYED, PLAIN):
        if address.startswith(scheme):
            return parse_address(address.removeprefix(scheme), field=field, mend=mend)
    raise InvalidInput(field, f"{address[:80]!r} is no address", mend)


def is_loopback(host: str | None) -> bool:
    """Tell whether only this machine reaches `host`."""
    name = (host or "").strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
