"""Where the time of one resume goes: time stamps inside an engine, contender beside contender.

    PYTHONPATH=src:. python benchmarks/vllm/timeline.py [--case medium] [--draws 7]
        [--contenders offloading,ours]

A prompt is stored; then the engine's pool is emptied and the prompt asked again, draw by draw.
Prints TTFT and CPU of every draw, and for the median one every call that stamps.py notes: when it
began after the request came, how long it took, its thread's CPU, the thread and the call.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import contenders
import msgspec
import restores

from tests.support.vllm import tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.wire import Boot

Draw = tuple[float, float, int, list[Any]]


class Noting:
    """A zygote whose engines note calls."""

    def __init__(self, zygote: Any) -> None:
        self._zygote = zygote

    def fork(self, boot: Boot) -> VllmWorker:
        noting = msgspec.structs.replace(boot, imports=[*boot.imports, "stamps"])
        worker: VllmWorker = self._zygote.fork(noting)
        return worker


def measure(names: list[str], case: restores.Case, *, draws: int) -> dict[str, list[Draw]]:
    """By contender: TTFT, CPU ms, cached tokens and stamps of each draw."""
    found: dict[str, list[Draw]] = {name: [] for name in names}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arena = stack.enter_context(contenders.Arena(Path(folder)))
        own = [stack.enter_context(arena.contender(name)) for name in names]
        own = [msgspec.structs.replace(each, zygote=Noting(each.zygote)) for each in own]
        model = arena.checkpoint(case.family)
        workers = stack.enter_context(restores.running(own, case, model))
        prompt = tiny.prompt(case.tokens, seed=7000)
        for contender in own:
            workers[contender.name].generate(prompt, max_tokens=1, top=0)
            restores.stored(workers[contender.name], contender)
        for number in range(draws):
            for contender in restores.in_turn(own, number):
                worker = workers[contender.name]
                restores.settle(worker)
                worker.ask("reset")
                worker.hook("stamps")
                answer, cpu_ms = restores.timed(worker, prompt)
                stamps = worker.hook("stamps")
                draw = answer.ttft_s * 1e3, cpu_ms, answer.cached, stamps
                found[contender.name].append(draw)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="medium")
    parser.add_argument("--contenders", default="offloading,ours")
    parser.add_argument("--draws", type=int, default=7)
    options = parser.parse_args()
    case = next(case for case in restores.CASES if case.name == options.case)
    for name, draws in measure(options.contenders.split(","), case, draws=options.draws).items():
        print(f"{name}: TTFT ms " + " ".join(f"{ttft:.1f}" for ttft, *_ in draws))
        print("    CPU ms " + " ".join(f"{cpu:.1f}" for _, cpu, *_ in draws))
        _, _, cached, stamps = sorted(draws)[len(draws) // 2]
        print(f"    {cached} cached; of the median draw:")
        start_s = min(began_s for _, _, began_s, _, _ in stamps)
        for thread, call, began_s, took_s, used_s in sorted(stamps, key=lambda stamp: stamp[2]):
            at_ms = (began_s - start_s) * 1e3
            times = f"{at_ms:9.2f} +{took_s * 1e3:7.2f}, CPU {used_s * 1e3:7.2f}"
            print(f"{times}  {thread:18} {call}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
