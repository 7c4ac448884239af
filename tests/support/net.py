"""Ports and addresses of this machine."""

from __future__ import annotations

import socket

import pytest

from ownerserve.kv.addresses import is_loopback


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
