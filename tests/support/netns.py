"""Two hosts on one machine: network namespaces with an address each, joined by a cable (veth)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

SUBNET = "10.199.78"


class Host(NamedTuple):
    """A namespace, and the address that the other one knows it by."""

    name: str
    address: str

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
    hosts = tuple(Host(f"os{mark}n{n}", f"{SUBNET}.{n + 1}") for n in range(2))
    links = [f"os{mark}v{n}" for n in range(2)]
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
