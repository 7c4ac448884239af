"""CPU of requests that neither load nor save, with and without a connector.

Prompts shorter than a block, so no contender has anything to keep. Engines stand side by side and
take turns in rounds, so that the machine's other work falls on all of them alike.

A whole request's CPU wanders by several percent from round to round, more than what is sought. So
there are two numbers: the request's CPU beside that of vLLM alone, and the CPU that the engine's
thread spends inside the connector's hooks, which is exact but leaves out what vLLM does because it
has a connector at all. The second is `noop`'s request less `none`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec

from tests.support.vllm import tiny
from tests.support.vllm.fleet import VllmWorker

PROMPT_TOKENS, OUTPUT_TOKENS = 24, 6
BATCH = 40


class Overhead(msgspec.Struct):
    """CPU milliseconds a request, the median over rounds of its ratio to the first engine, and
    CPU milliseconds a request inside each hook (median over rounds of the sum, and the largest)."""

    cpu_ms: float
    ratio: float
    hooks_ms: float
    by_hook_ms: dict[str, float]


def measure(workers: Mapping[str, VllmWorker], *, rounds: int) -> dict[str, Overhead]:
    """`workers`: the first is the one that the others are compared with."""
    spent: dict[str, list[float]] = {name: [] for name in workers}
    hooks: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    names = list(workers)
    for number in range(-1, rounds):
        order = names if number % 2 else names[::-1]
        for name in order:
            cpu_ms = _batch(workers[name], number)
            if number >= 0:  # the first round warms up
                spent[name].append(cpu_ms)
    for number in range(rounds, 2 * rounds):  # timing costs too: not in the rounds above
        for name in names:
            if number == rounds:
                workers[name].hook("time_hooks")
            _batch(workers[name], number)
            by_hook = workers[name].hook("hook_cpu_ms")
            hooks[name].append({hook: ms / BATCH for hook, ms in by_hook.items()})
    base = spent[names[0]]
    return {
        name: Overhead(
            cpu_ms=median(own),
            ratio=median(a / b for a, b in zip(own, base, strict=True)),
            hooks_ms=median(sum(by_hook.values()) for by_hook in hooks[name]),
            by_hook_ms={
                hook: median(by_hook.get(hook, 0.0) for by_hook in hooks[name])
                for hook in {hook for by_hook in hooks[name] for hook in by_hook}
            },
        )
        for name, own in spent.items()
    }


def _batch(worker: VllmWorker, number: int) -> float:
    before = worker.ask("usage")["cpu_s"]
    for request in range(BATCH):
        seed = 50_000 + BATCH * (number + 1) + request
        prompt = tiny.prompt(PROMPT_TOKENS, seed=seed)
        worker.generate(prompt, max_tokens=OUTPUT_TOKENS, top=0)
    return (worker.ask("usage")["cpu_s"] - before) / BATCH * 1e3
