"""A look into the store beside vLLM's scheduler: for one tenant, and answered whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from threading import Event

import pytest

from ownerserve.engines.vllm.scheduler_side.lookup import StoreLookup
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.node.transfers.offers import PeerOffer
from ownerserve.node.vocabulary.events import FindRecords, PeerPrefix, RecordsFound
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.model import Meta, Want, WriteDone
from ownerserve.store.tiers.backend import put
from tests.support.store.samples import Samples, digest
from tests.support.waits import until

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


class Peer:
    """A peer that holds one record, and says so when it is let."""

    def __init__(self, held: bytes) -> None:
        self.held, self.may_say = held, Event()

    def look(self, prefix: PeerPrefix) -> Mapping[bytes, float]:
        assert self.may_say.wait(300)
        return {self.held: 7.0}

    def offered(self, wants: Sequence[Want]) -> Mapping[bytes, PeerOffer]:
        return {}


def test_a_peer_is_waited_for_and_nobody_who_looks_meanwhile(store: Path) -> None:
    """What a peer has besides is told with what is here; other looks go before it."""
    away, own = digest("away"), record(ALICE).id
    peer = Peer(away)
    lookup = StoreLookup(store, peer)
    prefix = PeerPrefix(
        None, None, None, 0, (), {}, grid_blocks=1, compute_ms=1.0, turn_id=TurnId("t")
    )
    lookup.submit(FindRecords(1, (own, away), inf, peer=prefix))
    lookup.submit(FindRecords(2, (own,), inf, peer=prefix))  # all of it is here
    found = dict[int, RecordsFound]()

    def has(number: int) -> bool:
        found.update((one.operation_id, one) for one in lookup.poll())
        return number in found

    until(lambda: has(2), within_s=60, what="the second look's answer")
    assert found == {2: RecordsFound(2, {own: Tier.DISK})}
    peer.may_say.set()
    until(lambda: has(1), within_s=60, what="the first look's answer")
    assert found[1] == RecordsFound(1, {away: Tier.PEER, own: Tier.DISK}, peer_ready_ms=7.0)
    lookup.close()
