"""A session's owner follows its turns over real vLLM servers, a real gateway and a directory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from ownerserve.kv.ids import SessionId
from tests.support.vllm import connectors
from tests.support.vllm.ownerships import directory_process
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import Agent, WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm

TURNS = 6


def released(admin: str) -> float:
    """How many hand-overs that the gateway asked for were granted."""
    lines = httpx.get(f"{admin}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'outcome="released"' in line)


def test_a_gateway_has_a_session_handed_over_to_where_its_turns_are_done(
    rig: Rig, warm: WarmServers, tmp_path: Path
) -> None:
    """Each turn goes to the other worker. Whose the session is, the gateway knows by the lines on
    their answers: it asked the directory once, when nobody owned it."""
    model = rig.checkpoint("qwen3")
    with ExitStack() as all_:
        directory = all_.enter_context(directory_process(tmp_path))
        urls = []
        for number in range(2):
            connector = connectors.ours(
                tmp_path / f"store-{number}", directory=directory.address, worker_id=f"v{number}"
            )
            log = tmp_path / f"vllm-{number}.log"
            server = all_.enter_context(warm.serve(model, connector, log))
            urls.append(server.url)
        words = ("--policy", "round_robin", "--directory", directory.address)
        url, admin = all_.enter_context(gateway(urls, tmp_path / "gateway", *words))
        agent, seen = Agent(url, "s", 1), []
        for _ in range(TURNS):
            agent.turn()
            [decided] = httpx.get(f"{admin}/decisions?last=1", timeout=30).json()["decisions"]
            name = SessionId(decided["session"])
            until(lambda name=name: directory.record(name))
            time.sleep(0.3)  # what a hand-over takes, and more than a frame waits
            seen.append(directory.known(name))
        assert {record.owner.worker for record in seen} == {"v0", "v1"}
        assert released(admin) >= 1
        for before, after in pairwise(seen):
            is_same = before.owner == after.owner
            assert before.epoch == after.epoch if is_same else before.epoch < after.epoch
            assert before.version <= after.version
