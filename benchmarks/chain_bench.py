"""What it costs to find a session by content: CPU time of one turn of an agent without a key.

    python benchmarks/chain_bench.py

The body is an agent's: a system prompt, then messages of about 1.5 KiB. `next turn` is the usual
case, `new session` the dearest. Beside it what others do with a body: parse it (json.loads), and
the same chain with blake2b from hashlib. Process CPU time, the least of several medians.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ownerserve.kv.units import KIB
from ownerserve.router.requests.body import scan
from ownerserve.router.requests.identity import (
    Content,
    ContentChain,
    Scope,
    chunk_hashes,
    content_of,
)
from result import Row, report, smaller_is_better

SCOPE = Scope("t", "m")
GOALS_US = {32: 10, 400: 100}
MESSAGE_BYTES = 1500
ROUNDS, TIMES = 9, 101


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz      ", k=length))


def conversation(rng: random.Random, kib: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": text(rng, 8 * KIB)}]
    while len(json.dumps(messages)) < kib * KIB:
        messages.append({"role": "user", "content": text(rng, MESSAGE_BYTES)})
    return messages


def content(messages: list[dict[str, str]]) -> Content:
    found = content_of(scan(json.dumps({"model": "m", "messages": messages}).encode()), tenant="t")
    assert found is not None
    return found


def cpu_us(run: Callable[[], object], *, prepare: Callable[[], object] = int) -> float:
    """One call, after `prepare`, which is not counted: the least median of several rounds."""
    medians = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(TIMES):
            prepare()
            before = time.thread_time_ns()
            run()
            times.append(time.thread_time_ns() - before)
        medians.append(statistics.median(times))
    return min(medians) / 1e3


def blake2b_chain(body: bytes) -> None:
    digest = b""
    for at in range(0, len(body), KIB):
        digest = hashlib.blake2b(digest + body[at : at + KIB], digest_size=8).digest()


def rows_of(kib: int) -> list[Row]:
    rng = random.Random(kib)
    messages = conversation(rng, kib)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    now, before = content(messages), content(messages[:-2])
    chain = ContentChain()

    def known() -> None:
        for session in list(chain._sessions):
            chain.forget(session)
        place = chain.arrive(before, scope=SCOPE)
        assert place is not None
        chain.ended(place.session)

    def next_turn() -> None:
        place = chain.arrive(now, scope=SCOPE)
        assert place is not None
        assert place.parent is None

    def strange() -> None:
        for session in list(chain._sessions):
            chain.forget(session)

    goal, parse_us = f"<= {GOALS_US[kib]} us", cpu_us(lambda: json.loads(body))
    chain_us = cpu_us(lambda: blake2b_chain(body))
    return [
        smaller_is_better(
            f"hashing alone, {kib} KiB", "us CPU", cpu_us(lambda: chunk_hashes(now)),
            other=chain_us, other_name="chained blake2b", goal=goal,
        ),
        smaller_is_better(
            f"next turn, {kib} KiB", "us CPU", cpu_us(next_turn, prepare=known),
            other=parse_us, other_name="json.loads", goal=goal,
        ),
        smaller_is_better(
            f"new session, {kib} KiB", "us CPU", cpu_us(next_turn, prepare=strange),
            other=parse_us, other_name="json.loads",
        ),
        Row(f"field scan before it, {kib} KiB", "us CPU", cpu_us(lambda: scan(body))),
    ]  # fmt: skip


def memory_bytes(sessions: int = 5000) -> float:
    """Of one session in its fourth turn, its system prompt shared with the others."""
    rng = random.Random(0)
    system = {"role": "system", "content": text(rng, 8 * KIB)}
    chain = ContentChain()
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(sessions):
        messages = [system]
        for _ in range(4):
            messages.append({"role": "user", "content": text(rng, MESSAGE_BYTES)})
            chain.arrive(content(messages), scope=SCOPE)
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / sessions


def main() -> None:
    rows = [row for kib in GOALS_US for row in rows_of(kib)]
    rows.append(Row("memory of a session, fourth turn", "bytes", memory_bytes()))
    report("chain_bench", rows)


if __name__ == "__main__":
    main()
