"""What residency news costs a real `vllm serve` (CPU wheel, a tiny model): CPU of all its
processes, with who asks beside nobody, by turns in one run.

    python benchmarks/vllm_news.py [--rounds N] [--turns N]

Twelve sessions of 1,000 tokens or so over a pool of 160 blocks of 32, so that each turn computes
its prompt anew and evicts as much. Who asks does as a gateway does: over one connection, held
questions, the next one 50 ms after an answer with words. Beside it, while no turn comes: what one
gateway and four cost that are answered with a word every 50 ms, as if the pool lost blocks all the
time; and how long after a turn was sent the words of what it evicted are there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import count, islice
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from news_cost import GATEWAYS, NEWS_S, cpu_s  # noqa: E402
from result import Row, report  # noqa: E402
from tests.support.vllm import connectors, tiny  # noqa: E402
from tests.support.vllm.installed import distribution  # noqa: E402
from tests.support.vllm.serving import Server, serve  # noqa: E402

SESSIONS = 12
PROMPT_TOKENS = 1000
BLOCKS = 160
NEWS_WAIT_MS = 1000
IDLE_S = 8.0
PACED_ROUNDS = 3


class Follower(threading.Thread):
    """It follows the news of one worker until told to stop, as a gateway does."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.questions = self.words = self.bytes = 0
        self.heard_s: list[float] = []
        """When each page with something less or gone was there."""
        self._host = str(urlsplit(url).netloc)
        self._is_over = threading.Event()

    def run(self) -> None:
        after, held = 0, dict[tuple[str, str], int]()
        with closing(HTTPConnection(self._host)) as line:
            while not self._is_over.is_set():
                line.request("GET", f"/ownerserve/inventory?after={after}&wait_ms={NEWS_WAIT_MS}")
                body = line.getresponse().read()
                words = msgspec.json.decode(body)["words"]
                self.questions, self.bytes = self.questions + 1, self.bytes + len(body)
                self.words += len(words)
                is_less = False
                for word in words:
                    after = word["number"]
                    key, tokens = (word["session"], word["tier"]), word.get("tokens", 0)
                    is_less |= word["tier"] == "device" and tokens < held.get(key, 0)
                    held[key] = tokens
                if is_less:
                    self.heard_s.append(time.monotonic())
                if words:
                    self._is_over.wait(NEWS_S)

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        self.join()


class Round(msgspec.Struct):
    """A round's CPU, and what its follower asked and heard; `late_ms`: how long after a turn was
    sent the words of what it evicted were there."""

    cpu_s: float
    questions: int = 0
    words: int = 0
    late_ms: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    asked = parser.parse_args()
    alone: list[Round] = []
    heard: list[Round] = []
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as server:
        pids, numbers = processes(server.pid), count()
        alone_round(server, pids, islice(numbers, SESSIONS))
        idle = [idle_cpu_ms(pids)]
        with followed(server):
            idle.append(idle_cpu_ms(pids))
        for number in range(asked.rounds):
            both = [(alone, alone_round), (heard, heard_round)]
            for found, play in both[:: 1 - 2 * (number % 2)]:  # either goes first by turns
                found.append(play(server, pids, islice(numbers, asked.turns)))
        one, four = paced_cpu(server.url, pids, (1, GATEWAYS))
    turns = asked.rounds * asked.turns
    for what, rounds in (("nobody asks", alone), ("followed", heard)):
        print(
            what, "ms of CPU a turn:", *(f"{1e3 * one.cpu_s / asked.turns:.0f}" for one in rounds)
        )
    spent_s = sum(one.cpu_s for one in heard)
    questions = sum(one.questions for one in heard)
    late_ms = [ms for one in heard for ms in one.late_ms]
    more = [two.cpu_s / one.cpu_s - 1 for one, two in zip(alone, heard, strict=True)]
    what = f", {turns} turns"
    rows = [
        Row("CPU of a turn, nobody asks" + what, "ms", 1e3 * sum(r.cpu_s for r in alone) / turns),
        Row("CPU of a turn, one follows the news" + what, "ms", 1e3 * spent_s / turns),
        Row("more by, median of rounds", "share", median(more)),
        Row("its questions", "share", questions * one * NEWS_S / spent_s, goal="<= 0.03"),
        Row("questions a turn", "", questions / turns),
        Row("words a turn", "", sum(one.words for one in heard) / turns),
        Row("idle, nobody asks", "ms CPU/s", idle[0]),
        Row("idle, one follows", "ms CPU/s", idle[1]),
        Row("a word every 50 ms, one gateway", "share", one, goal="<= 0.03"),
        Row("a word every 50 ms, four gateways", "share", four, goal="<= 0.03"),
        Row("one question of four gateways'", "ms CPU", 1e3 * four * NEWS_S / GATEWAYS),
        Row("words of an eviction, after its turn was sent: median", "ms", median(late_ms)),
        Row("words of an eviction, after its turn was sent: most", "ms", max(late_ms)),
    ]
    report("vllm_news", rows)


def idle_cpu_ms(pids: list[int]) -> float:
    """Return the CPU ms a second of these processes while no turn comes."""
    before, began_s = cpu_s(pids), time.monotonic()
    time.sleep(IDLE_S)
    return 1e3 * (cpu_s(pids) - before) / (time.monotonic() - began_s)


def paced_cpu(url: str, pids: list[int], gateways: Sequence[int]) -> list[float]:
    """Return the CPU share of a core that so many gateways cost while each is told the last word
    every NEWS_S, above what the processes take beside it: the medians of rounds by turns. One of
    them asks not to be held, so that its questions go to the engine core, as one does for all
    whenever there is news. Where the machine is too busy for their pace the share is that of as
    many questions in full time."""
    found: list[list[float]] = [[] for _ in gateways]
    host = str(urlsplit(url).netloc)
    for _ in range(PACED_ROUNDS):
        for number, shares in zip(gateways, found, strict=True):
            idle = idle_cpu_ms(pids) / 1e3
            asked = [Paced(host, wait_ms=NEWS_WAIT_MS if at else 0) for at in range(number)]
            before, began_s = cpu_s(pids), time.monotonic()
            for one in asked:
                one.start()
            time.sleep(IDLE_S)
            questions = sum(one.stop() for one in asked)
            spent_s = cpu_s(pids) - before - idle * (time.monotonic() - began_s)
            shares.append(spent_s / questions * number / NEWS_S)
    return [median(shares) for shares in found]


class Paced(threading.Thread):
    """It asks for the last word every NEWS_S, over one connection, until told to stop."""

    def __init__(self, host: str, *, wait_ms: int) -> None:
        super().__init__(daemon=True)
        self._line = HTTPConnection(host)
        self._wait_ms = wait_ms
        self._last = msgspec.json.decode(self._ask(0))["last"]
        self._questions = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(NEWS_S):
            assert msgspec.json.decode(self._ask(self._last - 1))["words"]
            self._questions += 1

    def stop(self) -> int:
        """End; return how many questions were answered."""
        self._is_over.set()
        self.join()
        self._line.close()
        return self._questions

    def _ask(self, after: int) -> bytes:
        self._line.request("GET", f"/ownerserve/inventory?after={after}&wait_ms={self._wait_ms}")
        return self._line.getresponse().read()


@contextmanager
def followed(server: Server) -> Iterator[Follower]:
    """Follow the server's news meanwhile."""
    follower = Follower(server.url)
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


def alone_round(server: Server, pids: list[int], numbers: Iterable[int]) -> Round:
    """Play these turns, and nobody asks."""
    return Round(turns_cpu_s(server, pids, numbers)[0])


def heard_round(server: Server, pids: list[int], numbers: Iterable[int]) -> Round:
    """Play these turns, and one follows the news."""
    with followed(server) as follower:
        spent_s, sent_s = turns_cpu_s(server, pids, numbers)
    late_ms = [
        1e3 * (min(after) - at)
        for at in sent_s
        if (after := [then for then in follower.heard_s if then >= at])
    ]
    return Round(spent_s, follower.questions, follower.words, late_ms)


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A real server with our connector and plug-in."""
    model = folder / "model"
    tiny.write_checkpoint("qwen3", model)
    room = "--num-gpu-blocks-override", str(BLOCKS)
    connector = connectors.ours(folder / "store", restores="by-cost")
    installed = distribution(folder / "site")
    with serve(model, connector, folder / "vllm.log", *room, installed=installed) as server:
        yield server


def turns_cpu_s(
    server: Server, pids: list[int], numbers: Iterable[int]
) -> tuple[float, list[float]]:
    """Return the CPU seconds that these turns took of all processes, and when each was sent."""
    before, sent = cpu_s(pids), []
    for number in numbers:
        sent.append(time.monotonic())
        turn(server, number)
    time.sleep(2 * NEWS_S)
    return cpu_s(pids) - before, sent


def turn(server: Server, number: int) -> None:
    """The next session's prompt, which nobody has seen."""
    name = f"{1 + number % SESSIONS:032x}"
    body = {"model": "tiny", "prompt": tiny.prompt(PROMPT_TOKENS, seed=number), "max_tokens": 16}
    body |= {"session_id": name, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text


def processes(leader: int) -> list[int]:
    """Return all processes of a server, which leads their session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    main()
