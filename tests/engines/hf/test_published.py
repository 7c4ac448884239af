"""What real workers hold, as the directory knows it: tips, copies of guests, groups; and all of it
again after the directory has forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.rules import TierCode
from ownerserve.directory.terms import TermFile
from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.hf.fleet_rig import ServedWorker
from tests.support.hf.owning_fleet import NAME, PROMPT, BootClock, serve_at
from tests.support.waits import until

pytestmark = pytest.mark.engine

GROUP = "a" * 32


class Rig:
    """A directory and two workers of one model, each with a store."""

    def __init__(self, home: Path, **options: Any) -> None:
        embedded = EmbeddedDirectory(BootClock(), TermFile(), lease_s=1.5, opens_in_s=0.0)
        self.server = DirectoryServer(embedded)
        self.server.start()
        self.client = DirectoryClient(self.server.address)
        self.workers = [
            ServedWorker(
                WorkerOptions(
                    model="tiny-qwen3",
                    node=NodeSettings(spill_after_s=0.1, record_blocks=2),
                    directory=self.server.address,
                    worker_id=f"w{number}",
                    **{
                        "kv_bytes": 8 << 20,
                        "store": home / f"w{number}",
                        "host_cache_bytes": 4 << 20,
                        **options,
                    },
                )
            )
            for number in range(2)
        ]

    def ask(self, request: ask.Request) -> ask.Outcome:
        (outcome,) = self.client.execute([request])
        return outcome

    def tip(self) -> PrefixHash | None:
        found = self.ask(ask.FindSession(NAME))
        return found.prefix_hash if isinstance(found, ask.SessionIs) else None

    def places(self) -> list[tuple[str, TierCode]]:
        """Where the session's tip is held."""
        tip = self.tip()
        found = None if tip is None else self.ask(ask.Lookup((tip,)))
        if not isinstance(found, ask.Found):
            return []
        return sorted((unit.worker if unit else "", tier) for unit, tier, _ in found.locations)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.client.close()
        self.server.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(tmp_path)
    yield one
    one.close()


def test_tips_copies_and_groups_are_known_and_known_again_after_a_rebuild(rig: Rig) -> None:
    owner, guest = rig.workers
    serve_at(owner, PROMPT, group=GROUP)
    mine = [("w0", TierCode.DEVICE), ("w0", TierCode.HOST), ("w0", TierCode.DISK)]
    until(lambda: rig.places() == mine)
    tip = rig.tip()
    assert rig.ask(ask.FindGroup(GROUP)) == ask.GroupIs(((tip, 1),))

    serve_at(guest, PROMPT, group=GROUP)
    both = [*mine, ("w1", TierCode.DEVICE), ("w1", TierCode.HOST), ("w1", TierCode.DISK)]
    until(lambda: rig.places() == both)
    before = rig.ask(ask.FindSession(NAME))
    assert isinstance(before, ask.SessionIs) and before.owner.worker == "w0"

    rig.client.forget()
    until(lambda: rig.places() == both)
    after = rig.ask(ask.FindSession(NAME))
    assert isinstance(after, ask.SessionIs)
    assert (after.owner, after.epoch, after.version) == (before.owner, before.epoch, 1)
    assert rig.ask(ask.FindGroup(GROUP)) == ask.GroupIs(((tip, 1),))

    guest.close()
    rig.workers.remove(guest)
    until(lambda: rig.places() == mine)


def test_a_last_copy_that_is_evicted_is_told_and_counted(tmp_path: Path) -> None:
    """A session of a worker without a store stands on what the device alone holds."""
    rig = Rig(tmp_path, store=None, host_cache_bytes=0, kv_bytes=1 << 20)
    try:
        worker = rig.workers[0]
        serve_at(worker, PROMPT)
        until(lambda: rig.places() == [("w0", TierCode.DEVICE)])
        assert worker.metric("ownerserve_last_copies_lost_total") == 0
        for number in range(20):
            serve_at(worker, [11 + number, *PROMPT], name=SessionId(f"{number:032x}"))
            if not rig.places():
                break
        until(lambda: rig.places() == [])
        until(lambda: worker.metric("ownerserve_last_copies_lost_total") >= 1)
        assert rig.client.status().lost_copies >= 1
        (found,) = rig.client.execute([ask.FindSession(NAME)])
        assert isinstance(found, ask.SessionIs) and found.owner_live, "it goes on, computed anew"
    finally:
        rig.close()


def test_what_upkeep_removes_is_withdrawn_from_the_directory(tmp_path: Path) -> None:
    """By the inventory's word that it is gone: nothing waits for the directory's leave."""
    short = StoreLimits(range_ttl_s=3.0, point_ttl_s=3.0, upkeep_s=0.2)
    rig = Rig(tmp_path, host_cache_bytes=0, store_limits=short)
    try:
        serve_at(rig.workers[0], PROMPT)
        until(lambda: rig.places() == [("w0", TierCode.DEVICE), ("w0", TierCode.DISK)])
        until(lambda: rig.places() == [("w0", TierCode.DEVICE)])
        asked = rig.client.status().asked
        assert asked["publish"] and "drop" not in asked
    finally:
        rig.close()
