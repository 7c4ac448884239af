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
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.policies import DEFAULT_EVICTION, EVICTION_POLICIES
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory, OnDevice
from ownerserve.node.ownership.news import NewsWaiters
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.sim.engine.pace import load_pace
from result import Row, report

BLOCK = 16
CONTEXT = 100_000
CHUNK = 8192
ANSWER = 300
NEWS_S = 0.05
QUESTIONS = 500
GATEWAYS = 4


class Worker:
    """A device's cache with its news, and one gateway that waits for them. `spent`: CPU seconds."""

    def __init__(self, blocks: int) -> None:
        layout = Layout(BLOCK, (Component("kv", Coverage.RANGE, 64 * BLOCK, 64 * BLOCK),))
        self.cache = HeteroCache(layout, {"kv": blocks}, 4, EVICTION_POLICIES[DEFAULT_EVICTION]())
        self.spent = {"cache": 0.0, "words": 0.0, "pages": 0.0}
        self.gpu_s = 0.0
        self.pages = self.words = self.sent_bytes = 0
        self._pace = load_pace("qwen3-30b-a3b", "h200")
        self._inventory = Inventory()
        self._waiters = NewsWaiters(self._inventory)
        self._chains = Chains(BLOCK, block_bytes=layout.packed_block_bytes)
        self._on_device = OnDevice(self.cache, self._inventory, digest_at=self._chains.digest_at)
        self._after, self._next_page_s = 0, 0.0
        self._waiting = self._waiters.wait(0)
        self._encoder = msgspec.json.Encoder()

    def turn(self, turn: Turn, hashed: HashedPrefix) -> None:
        """A prompt, hashed where it was read, and an answer, step by step."""
        cache, turn_id, session_id = self.cache, turn.turn_id, turn.session_id
        assert session_id is not None
        with self._counted("words"):
            self._chains.hashed(turn.tokens, session_id, hashed)
        with self._counted("cache"):
            begun = cache.begin(turn, self.gpu_s)
        assert isinstance(begun, Begun)
        at = begun.restored
        while at < CONTEXT:
            upto = min(at + CHUNK, CONTEXT)
            new = upto - at
            took_ms = self._pace.step_ms(new, new * (at + new / 2), 0, 0)
            self._step(turn_id, turn.tokens[4 * at : 4 * upto], upto, took_ms=took_ms)
            at = upto
        for step in range(ANSWER):
            at += 1
            took_ms = self._pace.step_ms(0, 0.0, at, 1)
            self._step(turn_id, array("I", [step]).tobytes(), at, took_ms=took_ms)
        with self._counted("cache"):
            cache.finish(turn_id, self.gpu_s)
        with self._counted("words"):
            self._chains.digests(cache.residents.tokens_of(session_id), session_id)
            self._on_device.ended(session_id)

    def _step(self, turn_id: TurnId, tokens: bytes, upto: int, *, took_ms: float) -> None:
        with self._counted("cache"):
            assert not isinstance(self.cache.reserve(turn_id, upto, self.gpu_s), NoRoom)
            self.cache.advance(turn_id, tokens, self.gpu_s)
        self.gpu_s += took_ms / 1e3
        with self._counted("words"):
            if self._on_device.is_due:
                self._on_device.tick()
        if self._waiting.done() and self.gpu_s >= self._next_page_s:
            with self._counted("pages"):
                self._answer()

    def _answer(self) -> None:
        page = self._inventory.page(self._after, incarnation=1)
        self.sent_bytes += len(self._encoder.encode(page))
        self._after = page.words[-1].number if page.words else self._after
        self.pages, self.words = self.pages + 1, self.words + len(page.words)
        self._next_page_s = self.gpu_s + NEWS_S
        self._waiting = self._waiters.wait(self._after)

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        since = time.thread_time()
        yield
        self.spent[what] += time.thread_time() - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=256)
    parser.add_argument("--no-worker", action="store_true", help="leave the HTTP server out")
    asked = parser.parse_args()
    blocks = asked.sessions // 4 * (CONTEXT // BLOCK)
    worker = Worker(blocks)
    firsts = range(0, asked.sessions << 20, 1 << 20)
    prompts = [array("I", range(first, first + CONTEXT)).tobytes() for first in firsts]
    prefixes = [HashedPrefix(BLOCK) for _ in prompts]
    for prefix, prompt in zip(prefixes, prompts, strict=True):
        prefix.grow(prompt)
    for number in range(asked.turns):
        at = number % asked.sessions
        turn = Turn(TurnId(str(number)), SessionId(f"s{at:032d}"), prompts[at])
        worker.turn(turn, prefixes[at].copy())
    spent, gpu_s, pages, turns = worker.spent, worker.gpu_s, worker.pages, asked.turns
    news_s = spent["words"] + spent["pages"]
    way_ms, own_ms = (0.0, 0.0) if asked.no_worker else ways_cpu_ms()
    at_once = f", {asked.sessions} sessions, {blocks:,} blocks, {turns} turns"
    page_s = spent["pages"] / max(1, pages) + way_ms / 1e3
    rows = [
        Row("news, of one core while the engine computes" + at_once, "share", news_s / gpu_s),
        Row("news, of the CPU of cache and news", "share", news_s / (news_s + spent["cache"])),
        Row("a turn: words", "ms", 1e3 * spent["words"] / turns),
        Row("a turn: pages", "ms", 1e3 * spent["pages"] / turns),
        Row("a turn: the cache", "ms", 1e3 * spent["cache"] / turns),
        Row("a turn: the engine computes", "s", gpu_s / turns),
        Row("pages a second", "1/s", pages / gpu_s),
        Row("words a page", "", worker.words / max(1, pages)),
        Row("a page", "bytes", worker.sent_bytes / max(1, pages)),
        Row("a question's way through the worker's server, over one connection", "ms CPU", way_ms),
        Row("the same, a connection each", "ms CPU", own_ms),
        Row("all, of one core", "share", (news_s + pages * way_ms / 1e3) / gpu_s, goal="<= 0.03"),
        *(
            Row(f"with 20 pages a second for {n}", "share", n * page_s / NEWS_S, goal="<= 0.03")
            for n in (1, GATEWAYS)
        ),
    ]
    report("news_cost", rows)


def ways_cpu_ms() -> tuple[float, float]:
    """Return the CPU ms that a real worker process spends on one question for its inventory: over
    one connection for all, as a gateway asks, and over a connection each."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "ownerserve.cli.main", "worker", "--model", "tiny-qwen3"]
        flags = ["--port", "0", "--kv-memory", "2MiB", "--threads", "1", "--ready-file", str(ready)]
        process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                assert process.poll() is None, "the worker has ended"
                time.sleep(0.1)
            return asked_cpu_ms(ready.read_text().strip(), [process.pid])
        finally:
            process.terminate()
            process.wait(60)


def asked_cpu_ms(url: str, pids: list[int]) -> tuple[float, float]:
    """Return the CPU ms that these processes of a worker spend on one question for its inventory,
    over one connection for all and over a connection each: the least of four rounds."""
    host = str(urlsplit(url).netloc)
    kept, own = [], []
    with closing(HTTPConnection(host)) as line:
        for _ in range(50):
            _ask(line)
        for _ in range(4):  # by turns, so that what else the worker does falls on both
            before = cpu_s(pids)
            for _ in range(QUESTIONS):
                _ask(line)
            between = cpu_s(pids)
            for _ in range(QUESTIONS):
                with closing(HTTPConnection(host)) as once:
                    _ask(once)
            kept.append(between - before)
            own.append(cpu_s(pids) - between)
    return 1e3 * min(kept) / QUESTIONS, 1e3 * min(own) / QUESTIONS


def _ask(line: HTTPConnection) -> None:
    line.request("GET", "/ownerserve/inventory?after=0")
    answer = line.getresponse()
    answer.read()
    assert answer.status == 200, answer.status


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds of processes, from /proc."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
