"""SIGTERM with state that is not stored yet: with the printed `--shutdown-timeout` all of it is
durable before the process goes; what is lost without one is counted."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.vllm import connectors, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import Agent, WarmServers
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
TOKENS, ANSWER = 1500, 8
LATE: dict[str, Any] = {
    "record_blocks": 1,
    "copy_bytes": 256 << 10,
    "save_buffer_bytes": 256 << 10,
    "host_cache_bytes": 0,
}
"""128 tokens of the tiny Qwen3 may wait for the drive: the rest of a turn is late."""
FLAG = ("--shutdown-timeout", "60")
LOST = re.compile(r"(\d+) tokens of KV \(.*\) were not stored")


def with_a_backlog(rig: Rig, store: Path) -> tuple[VllmWorker, list[list[int]]]:
    """A worker with a slow drive: two turns have just ended, a third is on its way."""
    worker = rig.worker("qwen3", connectors.ours(store, **LATE))
    worker.hook("slow_commits", seconds=0.02)
    prompts = [tiny.prompt(TOKENS, seed=60 + number) for number in range(3)]
    for tokens in prompts[:2]:
        worker.generate(tokens, max_tokens=ANSWER)
    assert worker.hook("connector_status")["late_turns"] > 0
    worker.submit(prompts[2], max_tokens=ANSWER)
    worker.ask("run_steps", 2)
    return worker, prompts


def restored(rig: Rig, store: Path, prompts: list[list[int]]) -> list[int]:
    """Tokens of each prompt that another life finds."""
    after = rig.worker("qwen3", connectors.ours(store, **LATE))
    return [after.generate(tokens, max_tokens=1).cached for tokens in prompts]


def test_what_is_late_is_durable_before_a_worker_goes(rig: Rig, store: Path) -> None:
    worker, prompts = with_a_backlog(rig, store)
    worker.hook("terminate", timeout_s=60)
    assert restored(rig, store, prompts) == [(TOKENS - 1) // B * B] * 3
    assert not LOST.search(worker.log.read_text())


def test_what_is_lost_without_the_time_is_counted(rig: Rig, store: Path) -> None:
    """vLLM's default gives none: of the turn on its way only what was stored already is there."""
    worker, prompts = with_a_backlog(rig, store)
    worker.hook("terminate", timeout_s=0)
    ended = restored(rig, store, prompts[:2])
    missing = 2 * (TOKENS // B * B) - sum(ended)
    said = LOST.findall(worker.log.read_text())
    assert missing > 0
    assert len(said) == 1
    assert int(said[0]) >= missing


def test_a_server_stores_what_is_late_after_sigterm(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path
) -> None:
    """The printed command's flag, by the real server's own processes: a turn has just ended and
    another one is on its way."""
    model = rig.checkpoint("qwen3")
    connector = connectors.ours(store, **LATE)
    ended, running = Agent("", "s", 70), Agent("", "t", 71)
    with warm.serve(model, connector, tmp_path / "first.log", *FLAG) as server:
        ended.url = running.url = server.url
        ended.turn()
        with ThreadPoolExecutor(1) as beside:
            turn = beside.submit(running.turn, answer_tokens=300)
            until(lambda: load_of(server.url)["running_sequences"] or turn.done())
            os.kill(server.pid, signal.SIGTERM)
            turn.result()
        until(server.is_over, within_s=90)
    with warm.serve(model, connector, tmp_path / "second.log", *FLAG) as server:
        for agent in (ended, running):
            agent.url = server.url
            known = len(agent.tokens) - 41
            assert int(agent.turn()["cached"]) == known // B * B


def load_of(url: str) -> dict[str, Any]:
    load: dict[str, Any] = httpx.get(f"{url}/ownerserve/status", timeout=30).json()["load"]
    return load
