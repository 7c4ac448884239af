"""What a gateway expects to be cached of a turn is what its vLLM worker finds: after eviction, a
reset, a stop and a kill. Real servers, a real gateway; one case in CI, all by hand:

    OWNERSERVE_EXPECTED=1 python -m pytest -m vllm -s tests/vllm/test_expected.py
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER
from tests.support.net import free_port
from tests.support.vllm import connectors
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import Server, WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm

ALL = bool(os.environ.get("OWNERSERVE_EXPECTED"))
FIRST_TOKENS = 1000
POOL_BLOCKS: Mapping[str, int] = {"qwen3": 85, "gptoss": 150, "qwen3next": 40}
"""Too few for three sessions."""
FLAGS: Mapping[str, tuple[str, ...]] = {
    "qwen3next": (
        *("--dtype", "bfloat16", "--enable-prefix-caching", "--mamba-cache-mode", "align"),
        *("--mamba-ssm-cache-dtype", "bfloat16"),
    ),
}
"""What a family needs of vLLM, beside what all do."""
ENDS = (signal.SIGTERM, signal.SIGKILL) if ALL else (signal.SIGKILL,)
"""SIGTERM is in CI by test_returning."""
DEAR, CHEAP = 9.0, -9.0
"""Logarithms of how much longer than assumed loads took in a former life."""


class Turn(NamedTuple):
    """What was expected of a turn, and what came."""

    port: int
    reason: str
    action: str
    expected: int
    cached: int


class Talker:
    """A session whose prompts are text, a token for each byte."""

    def __init__(self, number: int) -> None:
        self.named = f"s{number}"
        self.name = Scope("-", "tiny").name(SESSION_HEADER, self.named)
        self.text = f"{number} " * (FIRST_TOKENS // 2)
        self.port = self.prompt_tokens = 0

    def turn(self, url: str) -> Turn:
        body = {"model": "tiny", "prompt": self.text, "max_tokens": 2, "temperature": 0}
        headers = {SESSION_HEADER: self.named}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        self.text += f"and {len(self.text)} " * 4
        usage, told = answer.json()["usage"], answer.headers
        self.prompt_tokens = usage["prompt_tokens"]
        self.port = int(told["x-ownerserve-worker"].rpartition(":")[2])
        return Turn(
            self.port,
            told["x-ownerserve-reason"],
            told["x-ownerserve-action"],
            int(told["x-ownerserve-expected-cached-tokens"]),
            int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0),
        )


class Town:
    """Workers whose pools are too small for their sessions, and a gateway."""

    def __init__(
        self, warm: WarmServers, model: Path, folder: Path, *, workers: int, restores: str
    ) -> None:
        self._warm, self._model = warm, model
        self._folder, self._restores = folder, restores
        self.ports = [free_port() for _ in range(workers)]
        self._servers: dict[int, Server] = {}
        self._lives = 0
        self.url = self.admin = ""
        self.talkers = [Talker(number) for number in range(2 * workers + 1)]
        self.block = 0

    def begin(self, port: int) -> None:
        self._lives += 1
        log = self._folder / f"vllm-{self._lives}.log"
        connector = connectors.ours(
            self._store(port), host_cache_bytes=0, restores=self._restores, worker_id=f"v{port}"
        )
        self._servers[port] = self._warm.begin(
            self._model,
            connector,
            log,
            *("--num-gpu-blocks-override", str(POOL_BLOCKS[self._model.name])),
            *("--shutdown-timeout", "60", *FLAGS.get(self._model.name, ())),
            port=port,
        )
        found = re.search(r"OwnerServe: blocks of (\d+) tokens", log.read_text(errors="replace"))
        assert found is not None
        self.block = int(found[1])

    def _store(self, port: int) -> Path:
        return self._folder / f"store-{port}"

    def end(self, port: int, how: signal.Signals) -> None:
        server = self._servers[port]
        if how is signal.SIGKILL:
            server.kill()
        else:
            os.kill(server.pid, how)
        until(server.is_over, within_s=120.0, what="it to end")
        with suppress(ProcessLookupError):
            server.kill()  # what it forked holds its port too

    def priced(self, port: int, loads: float) -> None:
        """What its former lives have measured, but for what loads took."""
        [costs] = self._store(port).glob("costs-*.json")
        known = msgspec.json.decode(costs.read_bytes())
        disk = known["tiers"]["disk"]
        disk["log_ratio"] = [loads] * len(disk["log_ratio"])
        costs.write_bytes(msgspec.json.encode(known))

    def reset(self, port: int) -> None:
        """As an operator clears vLLM's prefix cache."""

        def is_reset() -> bool:
            answer = httpx.post(f"http://127.0.0.1:{port}/reset_prefix_cache", timeout=60)
            return bool(answer.json()["success"])

        until(is_reset, what="a reset, which waits for copies")

    def settled(self) -> None:
        """Returns when all that turns left is stored and told, and the gateway has read it."""

        def is_stored() -> bool:
            held = {port: self._stored(port) for port in self.ports}
            return all(
                held[one.port].get(one.name, 0) > one.prompt_tokens - 2 * self.block
                for one in self.talkers
                if one.port
            )

        until(is_stored, what="all to be stored")
        before = {port: self._pages(port) for port in self.ports}
        until(
            lambda: all(self._pages(port) >= before[port] + 2 for port in self.ports),
            what="the gateway to have read it",
        )

    def _stored(self, port: int) -> dict[str, int]:
        url = f"http://127.0.0.1:{port}/ownerserve/inventory?after=0"
        page: dict[str, Any] = httpx.get(url, timeout=60).json()
        words = [one for one in page["words"] if one["is"] == "has" and one["tier"] == "disk"]
        return {one["session"]: one["tokens"] for one in words}

    def _pages(self, port: int) -> float:
        """How many pages of the worker's inventory the gateway has read."""
        text = httpx.get(f"{self.admin}/metrics", timeout=60).text
        start = r'^ownerserve_gateway_worker_inventory_total\{kind="pages",worker="127.0.0.1:'
        found = re.search(rf'{start}{port}"\}} (\S+)$', text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def turns(self) -> list[Turn]:
        """A turn of each session, when what was before is known."""
        self.settled()
        return self._as_expected([talker.turn(self.url) for talker in self.talkers])

    def turns_one_by_one(self) -> list[Turn]:
        """The same, and what each of them evicts is known to the next."""
        found = []
        for talker in self.talkers:
            self.settled()
            found.append(talker.turn(self.url))
        return self._as_expected(found)

    def _as_expected(self, turns: list[Turn]) -> list[Turn]:
        """Of most turns no more or less than a block was cached beyond what was expected. (A worker
        that is silent for long is not waited for: what it does is guessed then.)"""
        if ALL:
            text = httpx.get(f"{self.admin}/metrics", timeout=60).text.splitlines()
            said = [line for line in text if line.startswith("ownerserve_gateway_pressure_total{")]
            print(*turns, *said, "", sep="\n")
        assert median(abs(turn.expected - turn.cached) for turn in turns) <= self.block, turns
        assert all(turn.reason != "owner_lost" for turn in turns), turns
        return turns

    def close(self) -> None:
        for server in self._servers.values():
            with suppress(ProcessLookupError):
                server.kill()


@contextmanager
def town(
    warm: WarmServers, model: Path, folder: Path, *, workers: int, restores: str
) -> Iterator[Town]:
    with ExitStack() as all_:
        made = Town(warm, model, folder, workers=workers, restores=restores)
        all_.callback(made.close)
        for port in made.ports:
            made.begin(port)
        urls = [f"http://127.0.0.1:{port}" for port in made.ports]
        made.url, made.admin = all_.enter_context(gateway(urls, folder / "gateway"))
        yield made


def most(turns: list[Turn]) -> tuple[str, str]:
    """The reason and the action of most of them."""
    return (
        Counter(turn.reason for turn in turns).most_common(1)[0][0],
        Counter(turn.action for turn in turns).most_common(1)[0][0],
    )


@pytest.mark.parametrize(
    ("family", "workers"),
    [("qwen3", 2), ("gptoss", 2), ("qwen3next", 2)] if ALL else [("qwen3", 1)],
)
def test_what_is_expected_is_found(
    warm: WarmServers, rig: Rig, family: str, workers: int, tmp_path: Path
) -> None:
    """Workers load whatever is stored, though computing may be cheaper for so tiny a model."""
    model = rig.checkpoint(family)
    with town(warm, model, tmp_path, workers=workers, restores="always") as made:
        for talker in made.talkers:
            assert talker.turn(made.url).cached == 0
        evicted = made.turns_one_by_one()
        assert any(turn.action == "tail_recompute" for turn in evicted)
        assert min(turn.cached for turn in evicted) > FIRST_TOKENS - 2 * made.block
        made.settled()
        for port in made.ports:
            made.reset(port)
        assert most(made.turns()) == ("owner", "tail_recompute")
        for port, how in zip(cycle(made.ports), ENDS, strict=False):
            made.settled()
            homes = [talker.port for talker in made.talkers]
            made.end(port, how)
            made.begin(port)
            turns = made.turns()
            returned = [turn for home, turn in zip(homes, turns, strict=True) if home == port]
            # The other worker may compute it sooner than this one loads it.
            assert {turn.reason for turn in returned} <= {"recovered", "recomputed"}
            assert workers > 1 or most(returned) == ("recovered", "tail_recompute")


@pytest.mark.skipif(not ALL, reason="by hand: OWNERSERVE_EXPECTED=1")
@pytest.mark.parametrize("family", ["qwen3", "gptoss", "qwen3next"])
def test_what_a_worker_does_by_its_own_prices_is_expected(
    warm: WarmServers, rig: Rig, family: str, tmp_path: Path
) -> None:
    """By what it measures here, whatever that is; then in a life for which loads have taken for
    ever, and in one for which they have taken no time."""
    model = rig.checkpoint(family)
    with town(warm, model, tmp_path, workers=1, restores="by-cost") as made:
        for talker in made.talkers:
            talker.turn(made.url)
        made.turns_one_by_one()
        made.settled()
        [port] = made.ports
        made.reset(port)
        made.turns()
        for how, loads, expected in (
            (signal.SIGTERM, DEAR, ("recomputed", "colocated_prefill")),
            (signal.SIGKILL, CHEAP, ("recovered", "tail_recompute")),
        ):
            made.settled()
            made.end(port, how)
            made.priced(port, loads)
            made.begin(port)
            turns = made.turns()
            assert most(turns) == expected
            assert (median(turn.cached for turn in turns) == 0) == (loads == DEAR)
