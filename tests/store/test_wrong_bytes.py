"""0 wrong bytes under damage (short form of flipper.py), and proof that the test can fail."""

from __future__ import annotations

import random
import shutil

import pytest

from ownerserve.store.disk import read
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers import memory, remote
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.remote import RemoteTier
from tests.support.store import flipper


@pytest.fixture
def scratch():
    root = flipper.scratch()
    yield root
    shutil.rmtree(root)


def test_no_wrong_bytes_in_any_tier(scratch):
    tallies = flipper.all_tiers(scratch, reads=3000, faults=600, seed=1)
    for name, tally in tallies.items():
        assert tally["WRONG"] == 0, name
        assert tally["faults"] >= 200
        # Damage may hit padding or the part of a record that was not read; most is found.
        assert tally["found"] > tally["faults"] * 0.5, (name, tally)
        assert tally["right"] > tally["reads"] * 0.6, (name, tally)


@pytest.mark.parametrize("checked", [read, memory, remote])
def test_without_the_check_wrong_bytes_are_served(scratch, clock, monkeypatch, checked):
    """Take the digest check out and the same run must fail: a guard that is never seen to work
    proves nothing."""
    monkeypatch.setattr(checked, "open_chunks", lambda *_: None)
    dice = random.Random(3)
    if checked is memory:
        tier = MemoryTier(clock, flipper.LIMITS)
        damage = flipper.memory_damage(tier, dice)
    elif checked is remote:
        blobs = DirectoryBlobs(scratch)
        tier = RemoteTier("directory", blobs, clock=clock, keys=Keys(flipper.KEY))
        damage = flipper.directory_damage(scratch, dice)
    else:
        tier = flipper.DiskTier(
            scratch / "disk", clock, options=flipper.DiskOptions(limits=flipper.LIMITS)
        )
        damage = flipper.disk_damage(tier, dice)
    tally = flipper.run(tier, damage, reads=200, faults=100, dice=dice)
    tier.close()
    assert tally["WRONG"] > 0
