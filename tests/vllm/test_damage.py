"""kill -9 and flipped bytes: intact artifacts come back, damaged ones are misses, none is wrong."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.segment import segment_path
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

KILLS, REPLAYS = (25, 40) if os.environ.get("OWNERSERVE_LONG") else (3, 6)
ADOPTED_SHARE = 0.99


def flip_byte(store: Path, component: str, *, at: float) -> int:
    """Flip one bit in the payload of every record of a component; returns how many."""
    snapshot = StoreSnapshot(store)
    entries = [entry for entry in snapshot.entries() if entry.meta.component == component]
    snapshot.close()
    for entry in entries:
        with segment_path(store, entry.segment).open("r+b") as file:
            place = entry.offset + entry.header_bytes + int(at * (entry.payload_bytes - 1))
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x10]))
    return len(entries)


def wait_until_stored(store: Path) -> None:
    """Until no record has been added for half a second: commits trail the engine's own idleness."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        snapshot = StoreSnapshot(store)
        now = sum(1 for _ in snapshot.entries())
        snapshot.close()
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("family", "component", "at"),
    [
        ("gemma3", "swa", 0.1),
        ("gemma3", "swa", 0.9),
        ("gemma3", "dense", 0.5),
        ("qwen3next", "conv", 0.5),
        ("qwen3next", "recurrent", 0.5),
        ("qwen3next", "dense", 0.5),
    ],
)
def test_a_flipped_bit_in_any_group_is_one_failure_and_then_a_recompute(
    rig: Rig, family: str, component: str, at: float, store: Path
) -> None:
    prompt = tiny.prompt(500, seed=51)
    worker = rig.worker(family, connectors.ours(store))
    worker.generate(prompt)
    settle(worker)
    worker.shutdown()
    assert flip_byte(store, component, at=at) > 0
    after = rig.worker(family, connectors.ours(store))
    usage = after.ask("usage")
    answer = after.generate(prompt)
    oracle.assert_same(family, rig.cold(family, prompt), answer)
    spent = after.ask("usage")["steps"] - usage["steps"]
    assert spent < 2_000, "a failed load is remembered: asking again and again is a livelock"
    settle(after)
    # The engine is alive, and what it has in its own pool is right.
    oracle.assert_same(family, rig.cold(family, prompt), after.generate(prompt))


@pytest.mark.parametrize(("family", "component"), [("gemma3", "dense"), ("gemma3", "swa")])
def test_what_was_damaged_is_stored_anew(
    rig: Rig, family: str, component: str, store: Path
) -> None:
    """The recompute after a failed load heals the store: the life after it restores again."""
    prompt = tiny.prompt(500, seed=53)
    for _ in range(2):
        worker = rig.worker(family, connectors.ours(store))
        oracle.assert_same(family, rig.cold(family, prompt), worker.generate(prompt))
        settle(worker)
        worker.shutdown()
        flip_byte(store, component, at=0.5)
    worker = rig.worker(family, connectors.ours(store))
    worker.generate(prompt)
    settle(worker)
    worker.shutdown()
    healed = rig.worker(family, connectors.ours(store)).generate(prompt)
    assert healed.cached >= 384
    oracle.assert_same(family, rig.cold(family, prompt), healed)


def test_a_store_that_vanishes_under_a_running_engine_is_a_miss(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(500, seed=52)
    worker = rig.worker("gemma3", connectors.ours(store))
    worker.generate(prompt)
    settle(worker)
    for segment in (store / "segments").iterdir():
        segment.write_bytes(b"")
    worker.ask("reset")
    oracle.assert_same("gemma3", rig.cold("gemma3", prompt), worker.generate(prompt))
    settle(worker)


def test_kill_9_on_a_warm_store_loses_nothing_that_was_committed(rig: Rig, store: Path) -> None:
    """Sessions settle, more are under way, kill -9; the next life restores all that had settled.

    Long form: OWNERSERVE_LONG=1 (1,000 replays over 25 kills).
    """
    dice = random.Random(5)
    family, adopted, settled, replays = "gemma3", 0, [], 0
    worker = rig.worker(family, connectors.ours(store), num_gpu_blocks_override=600)
    for life in range(KILLS):
        fresh = [tiny.prompt(dice.randrange(260, 700), seed=1000 * life + n) for n in range(4)]
        worker.wait([worker.submit(prompt, max_tokens=4) for prompt in fresh])
        settle(worker)
        wait_until_stored(store)
        settled += fresh
        for n in range(3):  # these are under way when the axe falls
            worker.submit(tiny.prompt(600, seed=1000 * life + 500 + n), max_tokens=64)
        worker.ask("run_steps", dice.randrange(1, 12))
        worker.kill()
        worker = rig.worker(family, connectors.ours(store), num_gpu_blocks_override=600)
        for prompt in dice.choices(settled, k=REPLAYS):
            worker.ask("reset")
            answer = worker.generate(prompt, max_tokens=4)
            oracle.assert_same(family, rig.cold(family, prompt, max_tokens=4), answer)
            adopted += answer.cached >= (len(prompt) - 1) // 128 * 128
            replays += 1
    assert adopted >= ADOPTED_SHARE * replays, f"{adopted} of {replays} restored"
    settle(worker)
