"""Who opens a store with another key, or without one, is told what to mend; nothing is harmed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import put
from tests.support.store.samples import Samples

TENANT = b"t" * 32


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a record of a tenant."""
    tier = DiskTier(tmp_path / "store", WallClock())
    put(tier, Samples.meta(1, tenant=TENANT), Samples.payload(1))
    tier.close()
    return tmp_path / "store"


def told(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ownerserve.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def last_line(*arguments: str) -> str:
    ended = told(*arguments)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def check_it_is_unharmed(store: Path, key: bytes) -> None:
    (store / "KEY").write_bytes(key)
    tier = DiskTier(store, WallClock())
    assert Samples.read(tier, 1) == [Samples.payload(1)]
    tier.close()


def test_every_command_that_needs_the_key_says_which_is_wrong(store: Path) -> None:
    key = (store / "KEY").read_bytes()
    (store / "KEY").write_bytes(os.urandom(32))
    commands = (["gc"], ["verify"], ["purge", "--tenant", TENANT.hex()], ["rotate-key"])
    for name, *options in commands:
        line = last_line("store", name, str(store), *options)
        assert line.startswith(f"error: key: {store}/KEY did not seal the tenants' records"), line
        assert "name the key that did" in line
    assert told("store", "ls", str(store)).returncode == 0
    (store / "KEY").unlink()
    assert "put it back or name its copy (--key-file)" in last_line("store", "gc", str(store))
    check_it_is_unharmed(store, key)
    assert told("store", "verify", str(store)).returncode == 0


@pytest.mark.engine
@pytest.mark.parametrize("key", ["another", "none"])
def test_a_worker_does_not_start_over_a_store_whose_key_it_lacks(store: Path, key: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    right = (store / "KEY").read_bytes()
    (store / "KEY").unlink()
    if key == "another":
        (store / "KEY").write_bytes(os.urandom(32))
    line = last_line("worker", "--model", "tiny-qwen3", "--port", "0", "--store", str(store))
    assert line.startswith(f"error: key: {store}/KEY "), line
    assert "did not seal" in line if key == "another" else "is missing" in line
    check_it_is_unharmed(store, right)
