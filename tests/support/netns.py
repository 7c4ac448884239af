"""Two hosts on one machine: network namespaces with an address each, joined by a cable (veth)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

SUBNET = "10.199.78"
SECOND_SUBNET = "10.199.79"


class Host(NamedTuple):
    """A namespace, the address that the other one knows it by, and its end of the cable."""

    name: str
    address: str
    link: str

    def words(self, *command: str) -> list[str]:
        """The command line that runs `command` there."""
        return ["ip", "netns", "exec", self.name, *command]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, until the end. Skips without root, `ip` or leave of the kernel."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip` (iproute2)")
    mark = os.getpid() % 100_000
    links = [f"os{mark}v{n}" for n in range(2)]
    hosts = tuple(Host(f"os{mark}n{n}", f"{SUBNET}.{n + 1}", links[n]) for n in range(2))
    made: list[str] = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host.name)
            _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        except subprocess.CalledProcessError:
            pytest.skip("needs network namespaces")
        for host, link in zip(hosts, links, strict=True):
            _ip("link", "set", link, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", link)
            _ip("-n", host.name, "link", "set", link, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def second_cable(hosts: tuple[Host, Host]) -> tuple[Host, Host]:
    """The same two hosts by a cable beside the first one, on which each has another address."""
    second = tuple(
        host._replace(address=f"{SECOND_SUBNET}.{n + 1}", link=host.link.replace("v", "w"))
        for n, host in enumerate(hosts)
    )
    _ip("link", "add", second[0].link, "type", "veth", "peer", "name", second[1].link)
    for host in second:
        _ip("link", "set", host.link, "netns", host.name)
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
        _ip("-n", host.name, "link", "set", host.link, "up")
    return second[0], second[1]


def on(host: Host, *words: str) -> None:
    """Have `ip` do that on the host, as `link set LINK down`."""
    _ip("-n", host.name, *words)


@contextmanager
def inside(host: Host) -> Iterator[None]:
    """This thread is on that host until the end: its sockets, and those of threads begun here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as home, _namespace(host).open() as there:
        if libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(home.fileno(), 0)


def _namespace(host: Host) -> Path:
    return Path("/run/netns", host.name)


def link_bytes(host: Host) -> int:
    """How many bytes have come and gone by the host's end of the cable."""
    with inside(host):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (numbers,) = [line.split(":")[1].split() for line in lines if f"{host.link}:" in line]
    return int(numbers[0]) + int(numbers[8])
