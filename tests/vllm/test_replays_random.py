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
from tests.support.vllm.replays import EXACT, branch, replaying, replaying_async
from tests.support.vllm.rig import Rig, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind"),
]

REQUESTS = int(os.environ.get("OWNERSERVE_REPLAY_REQUESTS", "24"))
ANSWER_TOKENS = 4
LIVES = {
    "gptoss": ("small pool", "async", "roomy"),
    "gemma3": ("roomy", "async"),
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_batched_tokens": 512},
    "small pool": {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 150},
    "async": {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 200},
}


class Branching:
    """Owns the dice and the prompts of a run: a few of random length, and branches of branches."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.prompts = [
            tiny.prompt(self.dice.randint(700, 1500), seed=seed * 97 + n) for n in (0, 1)
        ]
        self._made = seed * 1000

    def following(self) -> list[int]:
        """A branch of some prompt before, anywhere behind its first quarter."""
        self._made += 1
        trunk = self.dice.choice(self.prompts[-8:])
        at = self.dice.randint(len(trunk) // 4, len(trunk))
        added = self.dice.choice((1, 20, 60, 200))
        asked = branch(trunk, at, seed=self._made, added=added)[:1900]
        self.prompts.append(asked)
        return asked


def a_life(
    rig: Rig, family: str, engine: str, *, store: Path, branching: Branching, requests: int
) -> Counter[str]:
    """One engine's life: batches of branches, now and then one aborted, the cache reset, or the
    store emptied under it. Returns what happened; `worst` in billionths."""
    start = replaying_async if engine == "async" else replaying
    worker = rig.worker(
        family,
        start(store, checkpoints="zero", host_cache_bytes=0),
        **ENGINES[engine],
        max_num_seqs=8,
    )
    worker.hook("watch_preemptions")
    seen: Counter[str] = Counter()
    for prompt in branching.prompts[-2:]:
        worker.generate(prompt, max_tokens=ANSWER_TOKENS)
    settle(worker)
    dice = branching.dice
    while seen["answers"] < requests:
        if dice.random() < 0.15:
            settle(worker)
            seen["resets"] += bool(worker.ask("reset"))
            if dice.random() < 0.3:
                seen["stores emptied"] += 1
                worker.hook("empty_store")
        asked = [branching.following() for _ in range(dice.randint(1, 4))]
        if dice.random() < 0.2:
            abort(worker, branching, seen)
        ids = worker.submit_all(asked, max_tokens=ANSWER_TOKENS)
        for tokens, answer in zip(asked, worker.wait(ids), strict=True):
            cold = rig.cold(family, tokens, max_tokens=ANSWER_TOKENS)
            judgement = oracle.judge(cold, answer)
            assert judgement.compared
            assert judgement.worst < EXACT, (len(tokens), answer.cached, judgement, dict(seen))
            seen["worst"] = max(seen["worst"], round(judgement.worst * 1e9))
            seen["answers"] += 1
            seen["prompt tokens"] += len(tokens)
            seen["cached tokens"] += answer.cached
    settle(worker)
    status = worker.hook("connector_status")
    seen["replays"] += status.get("replays", 0)
    seen["replayed tokens"] += status.get("replayed_tokens", 0)
    seen["loads"] += status.get("restore_loaded", 0)
    seen["failed loads"] += status.get("restore_miss", 0)
    seen["preemptions"] += sum(map(len, worker.hook("preemptions").values()))
    assert status.get("switched_off", 0) == 0
    assert status.get("misplaced", 0) == 0
    worker.shutdown()
    return seen


def abort(worker: VllmWorker, branching: Branching, seen: Counter[str]) -> None:
    """Begin one more branch and give it up some steps later, perhaps in mid-replay or mid-load."""
    [gone] = worker.submit_all([branching.following()], max_tokens=ANSWER_TOKENS)
    worker.ask("run_steps", branching.dice.randint(0, 3))
    worker.ask("abort", [gone])
    seen["aborts"] += 1


@pytest.mark.parametrize("family", LIVES)
def test_random_branches_answer_as_cold_engines_do(rig: Rig, family: str, tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    worst = 0
    for number, engine in enumerate(LIVES[family]):
        branching = Branching(seed=number + 1)
        share = -(-REQUESTS // len(LIVES[family]))
        store = tmp_path / engine
        seen = a_life(rig, family, engine, store=store, branching=branching, requests=share)
        worst = max(worst, seen.pop("worst"))
        total += seen
        if "OWNERSERVE_REPLAY_REQUESTS" in os.environ:
            print(json.dumps({"family": family, "engine": engine, "worst_e9": worst, **seen}))
    assert total["replays"] > total["answers"] / 8
    assert total["loads"]
