"""Ports and addresses of this machine."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

import pytest

from ownerserve.kv.addresses import is_loopback

LOWEST_PORT = 10_000
_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens now, below those that the kernel gives to whoever
    asks for any: it stays free until its server listens, and between two lives of it. No port is
    given twice."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert kernels > 2 * LOWEST_PORT, "the kernel keeps no ports for servers"
    draw = SystemRandom()  # Hypothesis seeds the other one, in each process alike
    while (port := draw.randrange(LOWEST_PORT, kernels)) in _given or not is_free(port):
        pass
    _given.add(port)
    return port


def is_free(port: int) -> bool:
    """Whether a server can listen on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def own_address() -> str:
    """An address of this machine that others reach; nothing is sent. Skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        found = str(probe.getsockname()[0])
    if is_loopback(found):
        pytest.skip("this machine has no address but loopback")
    return found


class Listening(NamedTuple):
    """A TCP socket that takes connections, and the process that holds it."""

    host: str
    port: int
    pid: int


def descendants(pid: int) -> Iterator[int]:
    """The process and all that came of it and live."""
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for at in threads for child in (at / "children").read_text().split()]
    except OSError:
        return  # it has just ended
    for child in children:
        yield from descendants(int(child))


def listening(pid: int) -> set[Listening]:
    """What the process and its descendants listen at, over IPv4 and IPv6."""
    places: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":  # LISTEN
                places[rest[5]] = _place(local)
    found = set()
    for one in descendants(pid):
        inodes = {link[8:-1] for link in _files(one) if link.startswith("socket:[")}
        found |= {Listening(*places[inode], one) for inode in inodes & places.keys()}
    return found


def _files(pid: int) -> Iterator[str]:
    """What the process has open, as the kernel names it."""
    with suppress(OSError):  # it has just ended
        for link in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(FileNotFoundError):  # closed since: that of this very listing, too
                yield str(link.readlink())


def _place(local: str) -> tuple[str, int]:
    """Host and port of the kernel's hexadecimal form: words of four bytes, each in host order."""
    host, port = local.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)
