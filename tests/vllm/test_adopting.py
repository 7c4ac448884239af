"""An engine is killed and does not come back: another one takes its store over and restores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32


@pytest.mark.parametrize("salt", ["", "alice"])
def test_what_a_killed_engine_stored_is_restored_by_who_adopts_it(
    rig: Rig, tmp_path: Path, store: Path, salt: str
) -> None:
    """A tenant's records are sealed anew, by the key of the store that they come to; they are found
    there where tenants have the same names, so both have one salt.key."""
    prompt = tiny.prompt(400, seed=613)
    dead = tmp_path / "dead"
    worker = rig.worker("qwen3", connectors.ours(dead))
    worker.generate(prompt, salt=salt)
    settle(worker)
    worker.kill()
    store.mkdir()
    shutil.copy(dead / "salt.key", store / "salt.key")
    after = rig.worker("qwen3", connectors.ours(store, adopt=[str(dead)]))
    answer = after.generate(prompt, salt=salt)
    assert answer.cached == 399 // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), answer)
    assert [path.parent.name for path in tmp_path.rglob("ADOPTED")] == ["dead"]
