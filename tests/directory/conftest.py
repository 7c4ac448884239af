"""A real server for those tests that want one, and this folder's helpers on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import Server, find_binary


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests; each starts from an empty one."""
    if find_binary() is None:
        pytest.skip("no valkey-server and no redis-server on PATH (apt-get install redis-server)")
    running = Server(tmp_path_factory.mktemp("valkey"))
    yield running
    running.stop()
