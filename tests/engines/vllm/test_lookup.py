"""A look into the store beside vLLM's scheduler: for one tenant, and answered whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from ownerserve.engines.vllm.scheduler_side.lookup import StoreLookup
from ownerserve.kv.clock import ManualClock
from ownerserve.node.vocabulary.events import FindRecords, RecordsFound
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.model import Meta, WriteDone
from ownerserve.store.tiers.backend import put
from tests.support.store.samples import Samples, digest

ALICE, BOB, NOBODY = digest("alice"), digest("bob"), digest("nobody")
INSIDE = digest("a boundary that both have")


def record(tenant: bytes) -> Meta:
    """Two blocks in a row, of which the first is what both tenants' prompts begin with."""
    return Samples.meta(tenant, tenant=tenant, units=2, boundaries=INSIDE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    tier = DiskTier(tmp_path / "store", ManualClock(1000.0))
    for tenant in (ALICE, BOB):
        assert isinstance(put(tier, record(tenant), Samples.payload(tenant)), WriteDone)
    yield tmp_path / "store"
    tier.close()


def asked(store: Path, find: FindRecords) -> RecordsFound:
    lookup = StoreLookup(store)
    lookup.submit(find)
    assert lookup.wait(60.0), "no answer"
    [found] = lookup.poll()
    lookup.close()
    return found


@pytest.mark.parametrize(("tenant", "own"), [(ALICE, [ALICE]), (BOB, [BOB]), (NOBODY, [])])
def test_what_begins_alike_is_found_for_its_own_tenant_alone(
    store: Path, tenant: bytes, own: list[bytes]
) -> None:
    found = asked(store, FindRecords(1, (), inf, (INSIDE,), tenant))
    assert [item.meta.id for item in found.inside] == [record(one).id for one in own]
    assert set(found.held) == {record(one).id for one in own}


def test_a_look_that_fails_is_answered_with_nothing(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FindRecords(7, (None,), inf)  # type: ignore[arg-type]
    assert asked(store, broken) == RecordsFound(7, {})
    assert "failed" in caplog.text
