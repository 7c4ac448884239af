"""What residency news costs a worker, beside what else it does: a ratio of CPU, in one run.

    python benchmarks/news_cost.py [--sessions N] [--turns N]

Sessions of 100,000 tokens in blocks of 16 over a device that holds a quarter of them, so that each
turn finds its state gone and evicts as much: the real cache, the tick of the node between two
steps, the inventory, and what a gateway is answered, a page of JSON at most every NEWS_S of the
time that the steps take on an H200 (the shipped pace of Qwen3-30B-A3B). Counted is the CPU of the
news (turns' ends, ticks, pages and their JSON) against that of the cache, and against the time that
the engine computes: one core for one GPU. The question's way through the HTTP server is measured
beside, over a real socket.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from pathlib import Path

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.policies import DEFAULT_EVICTION, EVICTION_POLICIES
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory, OnDevice
from ownerserve.node.ownership.news import NewsWaiters
from ownerserve.sim.engine.pace import load_pace
from result import Row, report

BLOCK = 16
CONTEXT = 100_000
CHUNK = 8192
ANSWER = 300
NEWS_S = 0.05
QUESTIONS = 1000


class Clock:
    """CPU seconds of this thread, by what they went to."""

    def __init__(self) -> None:
        self.spent = {"cache": 0.0, "news": 0.0, "pages": 0.0}

    def time(self, what: str, since: float) -> float:
        now = time.thread_time()
        self.spent[what] += now - since
        return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=256)
    parser.add_argument("--no-worker", action="store_true", help="leave the HTTP server out")
    asked = parser.parse_args()
    layout = Layout(BLOCK, (Component("kv", Coverage.RANGE, 64 * BLOCK, 64 * BLOCK),))
    blocks = asked.sessions // 4 * (CONTEXT // BLOCK)
    cache = HeteroCache(layout, {"kv": blocks}, 4, EVICTION_POLICIES[DEFAULT_EVICTION]())
    inventory = Inventory()
    waiters = NewsWaiters(inventory)
    on_device, pace = OnDevice(cache, inventory), load_pace("qwen3-30b-a3b", "h200")
    clock, encoder = Clock(), msgspec.json.Encoder()
    after = pages = words = sent_bytes = 0
    gpu_s = next_page_s = 0.0
    waiting = waiters.wait(0)
    prompts = [
        array("I", range(n << 20, (n << 20) + CONTEXT)).tobytes() for n in range(asked.sessions)
    ]

    def look(step_s: float) -> None:
        """The node's tick between two steps, and the answer to a gateway that waits."""
        nonlocal gpu_s, next_page_s, after, pages, words, sent_bytes, waiting
        gpu_s += step_s
        since = time.thread_time()
        if on_device.is_due:
            on_device.tick()
        since = clock.time("news", since)
        if waiting.done() and gpu_s >= next_page_s:
            page = inventory.page(after, incarnation=1)
            sent_bytes += len(encoder.encode(page))
            after = page.words[-1].number if page.words else after
            pages, words, next_page_s = pages + 1, words + len(page.words), gpu_s + NEWS_S
            waiting = waiters.wait(after)
            clock.time("pages", since)

    for number in range(asked.turns):
        session, turn_id = SessionId(f"s{number % asked.sessions:032d}"), TurnId(str(number))
        prompt = prompts[number % asked.sessions]
        since = time.thread_time()
        begun = cache.begin(Turn(turn_id, session, prompt), gpu_s)
        assert isinstance(begun, Begun)
        at = begun.restored
        since = clock.time("cache", since)
        while at < CONTEXT:
            since = time.thread_time()
            upto = min(at + CHUNK, CONTEXT)
            assert not isinstance(cache.reserve(turn_id, upto, gpu_s), NoRoom)
            cache.advance(turn_id, prompt[4 * at : 4 * upto], gpu_s)
            clock.time("cache", since)
            look(pace.step_ms(upto - at, (upto - at) * (at + (upto - at) / 2), 0, 0) / 1e3)
            at = upto
        for step in range(ANSWER):
            since = time.thread_time()
            assert not isinstance(cache.reserve(turn_id, at + 1, gpu_s), NoRoom)
            cache.advance(turn_id, array("I", [step]).tobytes(), gpu_s)
            at += 1
            clock.time("cache", since)
            look(pace.step_ms(0, 0.0, at, 1) / 1e3)
        since = time.thread_time()
        cache.finish(turn_id, gpu_s)
        since = clock.time("cache", since)
        on_device.ended(session)
        clock.time("news", since)
    spent = clock.spent
    news_s = spent["news"] + spent["pages"]
    at_once = f", {asked.sessions} sessions, {blocks:,} blocks, {asked.turns} turns"
    way_ms = 0.0 if asked.no_worker else way_cpu_ms()
    rows = [
        Row("news, of one core while the engine computes" + at_once, "share", news_s / gpu_s),
        Row("news, of the CPU of cache and news", "share", news_s / (news_s + spent["cache"])),
        Row("a turn: words", "ms", 1e3 * spent["news"] / asked.turns),
        Row("a turn: pages", "ms", 1e3 * spent["pages"] / asked.turns),
        Row("a turn: the cache", "ms", 1e3 * spent["cache"] / asked.turns),
        Row("a turn: the engine computes", "s", gpu_s / asked.turns),
        Row("pages a second", "1/s", pages / gpu_s),
        Row("words a page", "", words / max(1, pages)),
        Row("a page", "bytes", sent_bytes / max(1, pages)),
        Row("a question's way through the worker's server", "ms CPU", way_ms),
        Row("all, of one core", "share", (news_s + pages * way_ms / 1e3) / gpu_s, goal="<= 0.03"),
    ]
    report("news_cost", rows)


def way_cpu_ms() -> float:
    """Return the CPU ms that a real worker process spends on one question for its inventory, each
    over a connection of its own, as a gateway asks."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "ownerserve.cli.main", "worker", "--model", "tiny-qwen3"]
        flags = ["--port", "0", "--kv-memory", "2MiB", "--threads", "1", "--ready-file", str(ready)]
        process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                assert process.poll() is None, "the worker has ended"
                time.sleep(0.1)
            target = ready.read_text().strip() + "/ownerserve/inventory?after=0"
            for _ in range(50):
                urllib.request.urlopen(target).read()
            before = cpu_s(process.pid)
            for _ in range(QUESTIONS):
                urllib.request.urlopen(target).read()
            return 1e3 * (cpu_s(process.pid) - before) / QUESTIONS
        finally:
            process.terminate()
            process.wait(60)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
