"""Prompts whose windows are gone, on real vLLM on the CPU: what is computed, and TTFT.

    python benchmarks/vllm_replays.py [--draws 3] [--tokens 6000]

Three situations, tiny gpt-oss (2 windows of 64), blocks of 32, each draw with a prompt of its own:

    branch          60 new tokens behind a random part of a cached prompt
    evicted window  the next turn of a session whose windows vLLM has taken for other requests; the
                    store has the windows of the turn's end
    no points       the same after a reset of vLLM's cache, from a store that kept no window

for vLLM alone, vLLM with `--prefix-cache-retention-interval 256`, our connector, and our connector
under our scheduler. Prints means over draws with 95 % intervals; ratios are of vLLM alone over the
row, draw by draw.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "vllm"))

from contenders import Arena  # noqa: E402

from ownerserve.sim.suites.draws import compared  # noqa: E402
from result import Row, report, smaller_is_better  # noqa: E402
from tests.support.vllm import connectors, tiny  # noqa: E402
from tests.support.vllm.fleet import VllmWorker, vllm_version  # noqa: E402
from tests.support.vllm.replays import branch, replaying  # noqa: E402
from tests.support.vllm.rig import next_turn, settle  # noqa: E402

FAMILY = "gptoss"
ALONE, REPLAYING = "vLLM alone", "ours, replay"
RETAINED = {"prefix_cache_retention_interval": 256}
NO_POINTS = {"checkpoints": "zero", "host_cache_bytes": 0}
ENGINE = {"max_model_len": 8192, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 1024}
NEW_TOKENS, ANSWER_TOKENS = 60, 8
EVICT_WINDOWS = "replay_hooks:evict_windows"


class Asked(msgspec.Struct, frozen=True):
    """One prompt's cost: tokens that were not cached, and when its first token came."""

    computed: int
    ttft_ms: float


def ask(worker: VllmWorker, tokens: Sequence[int], **options: Any) -> Asked:
    answer = worker.generate(tokens, max_tokens=ANSWER_TOKENS, **options)
    return Asked(len(tokens) - answer.cached, answer.ttft_s * 1e3)


def a_branch(worker: VllmWorker, prompt: list[int], draw: int) -> Asked:
    at = random.Random(draw).randint(len(prompt) // 4, len(prompt) - 200)
    worker.generate(prompt, max_tokens=ANSWER_TOKENS)
    settle(worker)
    return ask(worker, branch(prompt, at, seed=draw, added=NEW_TOKENS))


def an_evicted_window(worker: VllmWorker, prompt: list[int], draw: int) -> Asked:
    answer = worker.generate(prompt, max_tokens=ANSWER_TOKENS, session=f"s{draw}")
    settle(worker)
    worker.hook(EVICT_WINDOWS)
    following = next_turn(prompt, answer, seed=draw, added=NEW_TOKENS)
    return ask(worker, following, session=f"s{draw}")


def from_the_store(worker: VllmWorker, prompt: list[int], draw: int) -> Asked:
    answer = worker.generate(prompt, max_tokens=ANSWER_TOKENS, session=f"s{draw}")
    settle(worker)
    assert worker.ask("reset")
    following = next_turn(prompt, answer, seed=draw, added=NEW_TOKENS)
    return ask(worker, following, session=f"s{draw}")


SITUATIONS: dict[str, tuple[Callable[[VllmWorker, list[int], int], Asked], dict[str, Any]]] = {
    "branch": (a_branch, {}),
    "evicted window": (an_evicted_window, {}),
    "no points": (from_the_store, NO_POINTS),
}


def ways(store: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Engine arguments of each row."""
    return {
        ALONE: connectors.none(),
        "vLLM, retention 256": {**connectors.none(), **RETAINED},
        "ours": connectors.ours(store / "plain", **settings),
        REPLAYING: replaying(store / "replay", **settings),
    }


def measure(
    arena: Arena, situation: str, folder: Path, *, draws: int, tokens: int
) -> dict[str, list[Asked]]:
    """One life of each way; each draw has the same prompt in all of them."""
    play, settings = SITUATIONS[situation]
    model, found = arena.checkpoint(FAMILY), {}
    for number, (name, arguments) in enumerate(ways(folder / "stores", settings).items()):
        with arena.contender("none") as contender:
            log = folder / f"{situation}-{number}.log"
            worker = contender.worker(model, log, **{**ENGINE, **arguments})
            play(worker, tiny.prompt(1000, seed=1), 0)  # the first run of every kernel
            found[name] = []
            for draw in range(1, draws + 1):
                settle(worker)
                assert worker.ask("reset")
                found[name].append(play(worker, tiny.prompt(tokens, seed=draw), draw))
            worker.kill()
    return found


def line(situation: str, name: str, own: Sequence[Asked], alone: Sequence[Asked]) -> str:
    computed = [float(one.computed) for one in own]
    fewer = compared([float(one.computed) for one in alone], computed)
    sooner = compared([one.ttft_ms for one in alone], [one.ttft_ms for one in own])
    return (
        f"| {situation} | {name} | {fmean(computed):,.0f} ({min(computed):,.0f} to "
        f"{max(computed):,.0f}) | {fewer} | {fmean(one.ttft_ms for one in own):.0f} | {sooner} |"
    )


def rows(situation: str, found: dict[str, list[Asked]]) -> list[Row]:
    ours = found[REPLAYING]
    made = []
    for name in found:
        if name == REPLAYING:
            continue
        for what, unit in (("computed", "tokens"), ("ttft_ms", "ms")):
            made.append(
                smaller_is_better(
                    f"{what.removesuffix('_ms')}, {situation}", unit,
                    fmean(getattr(one, what) for one in ours),
                    other=fmean(getattr(one, what) for one in found[name]), other_name=name,
                )
            )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--only", choices=list(SITUATIONS), action="append")
    given = parser.parse_args()
    made: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Arena(Path(folder)) as arena:
        print("| situation | | computed (range) | fewer by | TTFT ms | sooner by |")
        print("|---|---|---|---|---|---|")
        for situation in given.only or SITUATIONS:
            found = measure(arena, situation, Path(folder), draws=given.draws, tokens=given.tokens)
            for name, own in found.items():
                print(line(situation, name, own, found[ALONE]), flush=True)
            made += rows(situation, found)
    report("vllm_replays", made, others={"vllm": ".".join(map(str, vllm_version()))})


if __name__ == "__main__":
    main()
