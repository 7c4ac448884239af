"""Prompts whose windows are gone, on real vLLM on the CPU: what is computed, TTFT, CPU time.

    python benchmarks/vllm_replays.py [--family gptoss-costly] [--points branches] [--draws 5]

Three situations, each draw with a prompt of its own:

    branch          60 new tokens behind a random part of a cached prompt
    evicted window  the next turn of a session whose windows vLLM has taken for other requests; the
                    store has the windows of the turn's end
    no points       the same after a reset of vLLM's cache, from a store that kept no window

for vLLM alone, vLLM with `--prefix-cache-retention-interval 256`, our connector, and our connector
under our scheduler. All four engines live at the same time and are asked one after the other, each
draw beginning with another: what else the machine does falls on all. A question is asked when the
prompt before it is computed, and saved.

The families are of random weights, and so wide that a prompt costs time (`tiny.py`); the same names
without `-costly` cost nothing a token. Prints medians over draws with their range; ratios are of
vLLM alone over the row, draw by draw, with 95 % intervals. CPU is that of the engine's process, all
threads, from the question until what it leaves is saved. `worst` is the largest difference of a log
probability to vLLM alone, over answers to the same prompt.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "vllm"))

from contenders import Arena  # noqa: E402

from ownerserve.sim.suites.draws import compared  # noqa: E402
from result import Row, report, smaller_is_better  # noqa: E402
from tests.support.vllm import connectors, oracle, tiny  # noqa: E402
from tests.support.vllm.fleet import VllmWorker, vllm_version  # noqa: E402
from tests.support.vllm.replays import branch, replaying  # noqa: E402
from tests.support.vllm.rig import next_turn, settle  # noqa: E402
from tests.support.vllm.wire import Answer  # noqa: E402

FAMILIES = ("gptoss-costly", "gemma3-costly")
ALONE, RETAINING, PLAIN, REPLAYING = "vLLM alone", "vLLM, retention 256", "ours", "ours, replay"
RETAINED = {"prefix_cache_retention_interval": 256}
ENGINE = {"max_model_len": 8192, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 1024}
NEW_TOKENS, ANSWER_TOKENS = 60, 4
UNCOUNTED_DRAWS = 1
"""In the first draws kernels run for the first time, and prices are not measured yet."""
EVICT_WINDOWS = "replay_hooks:evict_windows"


class Asked(msgspec.Struct, frozen=True):
    """One prompt's cost: tokens that were not cached, when its first token came, and CPU time."""

    prompt: list[int]
    answer: Answer
    cpu_ms: float

    @property
    def computed(self) -> float:
        return float(len(self.prompt) - self.answer.cached)

    @property
    def ttft_ms(self) -> float:
        return self.answer.ttft_s * 1e3

    def off(self, other: Asked) -> float:
        """How far a log probability is off another engine's; 0 where the prompts differ."""
        same = self.prompt == other.prompt
        return oracle.judge(other.answer, self.answer).worst if same else 0.0


def ask(worker: VllmWorker, tokens: list[int], **options: Any) -> Asked:
    before_s = worker.ask("usage")["cpu_s"]
    answer = worker.generate(tokens, max_tokens=ANSWER_TOKENS, **options)
    settle(worker)
    return Asked(tokens, answer, (worker.ask("usage")["cpu_s"] - before_s) * 1e3)


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


Play = Callable[[VllmWorker, list[int], int], Asked]
LIVES: dict[str, dict[str, Play]] = {
    "branches": {"branch": a_branch, "evicted window": an_evicted_window},
    "zero": {"no points": from_the_store},
}
"""What is asked of the same engines, by the points that they keep."""


def ways(store: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Engine arguments of each row."""
    return {
        ALONE: connectors.none(),
        RETAINING: {**connectors.none(), **RETAINED},
        PLAIN: connectors.ours(store / "plain", **settings),
        REPLAYING: replaying(store / "replay", **settings),
    }


def measure(
    arena: Arena,
    family: str,
    checkpoints: str,
    *,
    draws: int,
    tokens: int,
    restores: str,
    until_s: float,
) -> dict[str, dict[str, list[Asked]]]:
    """Draws by situation and way; each draw has the same prompt in all ways. None but the first
    begins after `until_s`, by the monotonic clock."""
    settings = {"checkpoints": checkpoints, "restores": restores, "host_cache_bytes": 0}
    model, plays = arena.checkpoint(family), LIVES[checkpoints]
    with arena.contender("none") as contender:
        workers = {
            name: contender.worker(
                model, contender.data / f"{number}.log", **{**ENGINE, **arguments}
            )
            for number, (name, arguments) in enumerate(ways(contender.data, settings).items())
        }
        names = list(workers)
        found: dict[str, dict[str, list[Asked]]] = {
            at: {name: [] for name in names} for at in plays
        }
        for draw in range(draws + UNCOUNTED_DRAWS):
            if draw > UNCOUNTED_DRAWS and time.monotonic() > until_s:
                break
            for number, (situation, play) in enumerate(plays.items()):
                prompt = tiny.prompt(tokens, seed=1 + draw * len(plays) + number)
                for name in [*names[draw % len(names) :], *names[: draw % len(names)]]:
                    settle(workers[name])
                    assert workers[name].ask("reset")
                    asked = play(workers[name], prompt, draw)
                    if draw >= UNCOUNTED_DRAWS:
                        found[situation][name].append(asked)
        for worker in workers.values():
            worker.kill()
    return found


MEASURES = {"computed": "tokens", "ttft_ms": "ms", "cpu_ms": "ms"}


def line(labels: Sequence[str], own: Sequence[Asked], alone: Sequence[Asked]) -> str:
    cells = list(labels)
    for name in MEASURES:
        mine = [getattr(one, name) for one in own]
        theirs = [getattr(one, name) for one in alone]
        cells.append(f"{median(mine):,.0f} ({min(mine):,.0f} to {max(mine):,.0f})")
        is_compared = own is not alone and len(own) > 1
        cells.append(str(compared(theirs, mine)) if is_compared else "")
    cells.append(f"{max(map(Asked.off, own, alone)):.1e}")
    return f"| {' | '.join(cells)} |"


def rows(family: str, situation: str, found: dict[str, list[Asked]]) -> list[Row]:
    return [
        smaller_is_better(
            f"{what.removesuffix('_ms')}, {family}, {situation}", unit,
            median(getattr(one, what) for one in found[REPLAYING]),
            other=median(getattr(one, what) for one in found[name]), other_name=name,
        )
        for name in found if name != REPLAYING
        for what, unit in MEASURES.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--family", action="append")
    parser.add_argument("--points", choices=list(LIVES), action="append")
    parser.add_argument("--restores", choices=("by-cost", "always"), default="by-cost")
    parser.add_argument("--minutes", type=float, default=60, help="no draw begins later")
    given, began_s = parser.parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end with this process
    made: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Arena(Path(folder)) as arena:
        print("| | | | computed | fewer | TTFT ms | sooner | CPU ms | less | worst |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for family in given.family or FAMILIES:
            for checkpoints in given.points or LIVES:
                all_found = measure(
                    arena, family, checkpoints,
                    draws=given.draws, tokens=given.tokens, restores=given.restores,
                    until_s=began_s + given.minutes * 60,
                )  # fmt: skip
                for situation, found in all_found.items():
                    for name, own in found.items():
                        print(line((family, situation, name), own, found[ALONE]), flush=True)
                    made += rows(family, situation, found)
    report("vllm_replays", made, others={"vllm": ".".join(map(str, vllm_version()))})


if __name__ == "__main__":
    main()
