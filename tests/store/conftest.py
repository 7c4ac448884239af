"""What the store's tests share: a clock, small artifacts, a small store on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from tests.support.store.samples import Samples
from tests.support.store.servers import MooncakeCluster, s3_server

LIMITS = TierLimits(KindLimits(8 * MIB, 3600.0), KindLimits(2 * MIB, 60.0))


@pytest.fixture
def samples() -> type[Samples]:
    return Samples


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000.0)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server, in a process of its own."""
    pytest.importorskip("moto.server")
    with s3_server(tmp_path_factory.mktemp("s3") / "moto.log") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def mooncake_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """A real Mooncake Store, for tests that do not harm it."""
    cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.close()


OpenDisk = Callable[..., DiskTier]


@pytest.fixture
def open_disk(tmp_path: Path, clock: ManualClock) -> Iterator[OpenDisk]:
    """Opens the test's store; closes what is still open at the end."""
    opened: list[DiskTier] = []

    def open_(directory: Path | None = None, **changes: Any) -> DiskTier:
        options = DiskOptions(**{"limits": LIMITS, "segment_bytes": MIB} | changes)
        opened.append(DiskTier(directory or tmp_path / "store", clock, options=options))
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()
