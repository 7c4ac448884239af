"""Which ports there are, and who may reach them."""

from __future__ import annotations

import os
import socket

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import (
    FREE,
    LISTENERS,
    LOOPBACK,
    Protection,
    ServicePort,
    check_reach,
    open_listener,
)
from tests.support.net import Listening, listening

BY_NAME = pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.name)


@BY_NAME
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", ""])
def test_nothing_is_open_to_others_without_a_word(listener: ServicePort, host: str) -> None:
    with pytest.raises(InvalidInput, match="reachable from outside") as told:
        check_reach(listener, host, Protection.OPEN)
    assert told.value.field == listener.host_option
    assert listener.opened_by in told.value.mend
    with pytest.raises(InvalidInput, match="reachable from outside"):
        open_listener(listener, host, 0, protection=Protection.OPEN)


@BY_NAME
def test_keys_or_the_operators_word_open_it(listener: ServicePort) -> None:
    for protection in (Protection.KEYED, Protection.VOUCHED):
        check_reach(listener, "10.0.0.5", protection)
    for host in (LOOPBACK, "127.8.8.8", "::1", "[::1]", "localhost"):
        check_reach(listener, host, Protection.OPEN)


def test_default_ports_do_not_meet() -> None:
    ports = [listener.port for listener in LISTENERS if listener.port != FREE]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_a_listener_takes_its_port_alone(host: str) -> None:
    try:
        bound = open_listener(LISTENERS[0], host, 0, protection=Protection.OPEN)
    except InvalidInput:
        pytest.skip("this machine has no IPv6")
    with bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"--host/--port: .*{port}"):
            open_listener(LISTENERS[0], host, port, protection=Protection.OPEN)


@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.77"])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(InvalidInput, match=host) as told:
        open_listener(LISTENERS[0], host, 0, protection=Protection.VOUCHED)
    assert told.value.field.startswith("--host")


def test_the_scan_sees_what_listens() -> None:
    """The scan of the demo's sockets is worth something only if it would see an open one."""
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server((LOOPBACK, 0)) as own,
    ):
        found = listening(os.getpid())
        assert Listening("0.0.0.0", everywhere.getsockname()[1], os.getpid()) in found
        assert Listening(LOOPBACK, own.getsockname()[1], os.getpid()) in found
