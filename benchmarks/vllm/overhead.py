"""CPU of requests that neither load nor save, with and without a connector.

Prompts shorter than a block, so no contender has anything to keep. Engines stand side by side and
take turns in rounds, so that the machine's other work falls on all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec
import tiny
from fleet import VllmWorker

PROMPT_TOKENS, OUTPUT_TOKENS = 24, 6
BATCH = 40


class Overhead(msgspec.Struct):
    """CPU milliseconds a request, and the median over rounds of its ratio to the first engine."""

    cpu_ms: float
    ratio: float


def measure(workers: Mapping[str, VllmWorker], *, rounds: int) -> dict[str, Overhead]:
    """`workers`: the first is the one that the others are compared with."""
    spent: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for number in range(-1, rounds):
        order = names if number % 2 else names[::-1]
        for name in order:
            cpu_ms = _batch(workers[name], number)
            if number >= 0:  # the first round warms up
                spent[name].append(cpu_ms)
    base = spent[names[0]]
    return {
        name: Overhead(median(own), median(a / b for a, b in zip(own, base, strict=True)))
        for name, own in spent.items()
    }


def _batch(worker: VllmWorker, number: int) -> float:
    before = worker.ask("usage")["cpu_s"]
    for request in range(BATCH):
        seed = 50_000 + BATCH * (number + 1) + request
        prompt = tiny.prompt(PROMPT_TOKENS, seed=seed)
        worker.generate(prompt, max_tokens=OUTPUT_TOKENS, top=0)
    return (worker.ask("usage")["cpu_s"] - before) / BATCH * 1e3
