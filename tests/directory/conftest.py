"""A real server for those tests that want one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.terms import TermFile
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.source import parse_source
from ownerserve.kv.clock import ManualClock
from tests.support.directory.contract import LEASE_S, World
from tests.support.directory.servers import Server, find_binary


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests; each starts from an empty one."""
    if find_binary() is None:
        pytest.skip("no valkey-server and no redis-server on PATH (apt-get install redis-server)")
    running = Server(tmp_path_factory.mktemp("valkey"))
    yield running
    running.stop()


@pytest.fixture(params=["embedded", "valkey"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "embedded":
        clock = ManualClock(1000.0)
        embedded = EmbeddedDirectory(clock, TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        yield World(embedded, clock.advance)
        return
    server: Server = request.getfixturevalue("server")
    server.client().flushall()
    options = ValkeyOptions(lease_s=LEASE_S)
    shared = ValkeyDirectory(parse_source(server.url), options)
    shared.status()
    server.client().hset("ownerserve:term", "open_us", "0")  # a new fleet: no lease of before
    yield World(shared, time.sleep)
    shared.close()
