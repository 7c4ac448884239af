"""Random branches under replays: aborts, chunks, pools that preempt, async steps, resets, loads
that fail. Every answer is the cold one, and no block is left over.

A few dozen requests; as many as `OWNERSERVE_REPLAY_REQUESTS` says where it is set, with a summary.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import oracle, tiny
from tests.support.vllm.fleet import VllmWorker, vllm_version
from tests.support.vllm.replays import EXACT, branch, hook, replaying, replaying_async
from tests.support.vllm.rig import Rig, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind"),
]

LONG = "OWNERSERVE_REPLAY_REQUESTS" in os.environ
REQUESTS = int(os.environ.get("OWNERSERVE_REPLAY_REQUESTS", "24"))
SEED = int(os.environ.get("OWNERSERVE_REPLAY_SEED", "0"))
ANSWER_TOKENS = 4
TRUNK_TOKENS = (700, 1500)
LIVES = {
    "gptoss": ("small pool", "async", "roomy"),
    "gemma3": ("small pool", "async"),
}
CHUNKED = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 40}
"""At most 40 tokens of a prompt a step: no replay of these models is done in three."""
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_batched_tokens": 512},
    "small pool": {**CHUNKED, "scheduler_reserve_full_isl": False},
    "async": {**CHUNKED, "num_gpu_blocks_override": 200},
}
SMALL_POOL = {"gptoss": 100, "gemma3": 140}
"""Blocks: one request with a replay fits, and no eight."""


class Branching:
    """Owns the dice and the prompts of a run: long ones, and branches of branches of them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._made = seed * 1000
        self.prompts = [self._trunk(), self._trunk()]

    def following(self) -> list[int]:
        """A branch of some long prompt before, anywhere behind its first quarter."""
        long = [prompt for prompt in self.prompts[-8:] if len(prompt) >= TRUNK_TOKENS[0]]
        trunk = self.dice.choice(long) if long else self._trunk()
        at = self.dice.randint(len(trunk) // 4, len(trunk))
        added = self.dice.choice((1, 20, 60, 200, 500))
        asked = branch(trunk, at, seed=self._next(), added=added)[:1900]
        self.prompts.append(asked)
        return asked

    def _trunk(self) -> list[int]:
        return tiny.prompt(self.dice.randint(*TRUNK_TOKENS), seed=self._next())

    def _next(self) -> int:
        self._made += 1
        return self._made


def a_life(
    rig: Rig, family: str, engine: str, *, store: Path, requests: int, seed: int, control: str
) -> Counter[str]:
    """One engine's life: batches of branches, now and then one aborted, the cache reset, or the
    store emptied under it. Returns what happened; `worst` in billionths."""
    branching = Branching(seed)
    start = replaying_async if engine == "async" else replaying
    options = dict(ENGINES[engine])
    if engine == "small pool":
        options["num_gpu_blocks_override"] = SMALL_POOL[family]
    settings = start(store, checkpoints="zero", host_cache_bytes=0, restore_deadline_s=60)
    worker = rig.worker(family, settings, **options, max_num_seqs=8)
    hook(worker, "watch_interruptions")
    seen: Counter[str] = Counter()
    for prompt in branching.prompts:
        worker.generate(prompt, max_tokens=ANSWER_TOKENS)
    if control:
        hook(worker, control)
    settle(worker)
    dice = branching.dice
    while seen["answers"] < requests:
        if not seen["answers"] or dice.random() < 0.15:
            settle(worker)
            seen["resets"] += bool(worker.ask("reset"))
            if seen["answers"] and dice.random() < 0.3:
                seen["stores emptied"] += 1
                worker.hook("empty_store")
        asked = [branching.following() for _ in range(dice.randint(1, 8))]
        if dice.random() < 0.2:
            abort(worker, branching, seen)
        ids = worker.submit_all(asked, max_tokens=ANSWER_TOKENS)
        for tokens, answer in zip(asked, worker.wait(ids), strict=True):
            cold = rig.cold(family, tokens, max_tokens=ANSWER_TOKENS)
            judgement = oracle.judge(cold, answer)
            assert judgement.compared
            told = (len(tokens), answer.cached, judgement, dict(seen))
            assert judgement.worst < EXACT or control, told
            seen["wrong"] += judgement.worst >= EXACT
            seen["worst"] = max(seen["worst"], round(min(judgement.worst, 1e3) * 1e9))
            seen["answers"] += 1
            seen["prompt tokens"] += len(tokens)
            seen["cached tokens"] += answer.cached
    settle(worker)  # fails where a block is still referenced
    status = worker.hook("connector_status")
    seen["replays"] += status.get("replays", 0)
    seen["replayed tokens"] += status.get("replayed_tokens", 0)
    seen["loads"] += status.get("restore_loaded", 0)
    seen["failed loads"] += status.get("restore_miss", 0)
    seen.update(hook(worker, "interruptions"))
    assert status.get("switched_off", 0) == 0
    assert status.get("misplaced", 0) == 0
    assert hook(worker, "replay_lengths")["running"] == 0
    worker.shutdown()
    return seen


def abort(worker: VllmWorker, branching: Branching, seen: Counter[str]) -> None:
    """Begin one more branch and give it up some steps later, perhaps in mid-replay or mid-load."""
    [gone] = worker.submit_all([branching.following()], max_tokens=ANSWER_TOKENS)
    worker.ask("run_steps", branching.dice.randint(0, 6))
    worker.ask("abort", [gone])
    seen["aborts"] += 1


def lives(rig: Rig, family: str, folder: Path, *, control: str = "") -> Counter[str]:
    """All lives of a family one after the other, and what happened in them."""
    total: Counter[str] = Counter()
    for number, engine in enumerate(LIVES[family], start=1 + 10 * SEED):
        share = -(-REQUESTS // len(LIVES[family]))
        seen = a_life(
            rig, family, engine,
            store=folder / engine, requests=share, seed=number, control=control,
        )  # fmt: skip
        worst = max(total["worst"], seen["worst"])
        total += seen
        total["worst"] = worst
        if LONG:
            print(json.dumps({"family": family, "engine": engine, "control": control, **seen}))
    return total


@pytest.mark.parametrize("family", LIVES)
def test_random_branches_answer_as_cold_engines_do(rig: Rig, family: str, tmp_path: Path) -> None:
    total = lives(rig, family, tmp_path)
    assert total["replays"] > total["answers"] / 8
    assert total["chunked"]
    assert total["loads"]


@pytest.mark.skipif(not LONG, reason="test_replays.py has these controls too")
@pytest.mark.parametrize("control", ["write_what_is_replayed", "replay_half"])
@pytest.mark.parametrize("family", LIVES)
def test_random_branches_tell_a_control(
    rig: Rig, family: str, control: str, tmp_path: Path
) -> None:
    assert lives(rig, family, tmp_path, control=control)["wrong"]
