"""A real server for those tests that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.terms import TermFile
from ownerserve.directory.valkey import directory as valkey
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


AHEAD_US = "test:ahead_us"
"""A key of the real server: how far ahead the directory takes its clock to be."""


@pytest.fixture(params=["embedded", "valkey"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "embedded":
        clock = ManualClock(1000.0)
        embedded = EmbeddedDirectory(clock, TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        yield World(embedded, clock.advance)
        return
    server: Server = request.getfixturevalue("server")
    client = server.client()
    client.flushall()
    reads_clock = "local now = "
    assert valkey.BEGIN.count(reads_clock) == 1
    ahead = f"{reads_clock}tonumber(redis.call('GET', '{AHEAD_US}') or 0) + "
    monkeypatch.setattr(valkey, "BEGIN", valkey.BEGIN.replace(reads_clock, ahead))
    shared = ValkeyDirectory(parse_source(server.url), ValkeyOptions(lease_s=LEASE_S))
    shared.status()
    client.hset("ownerserve:term", "open_us", "0")  # a new fleet: no lease of before
    yield World(shared, lambda for_s: client.incrby(AHEAD_US, int(for_s * 1e6)))
    shared.close()
    client.close()
