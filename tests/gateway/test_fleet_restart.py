"""All workers are killed and come back at once, under agents with long contexts: nothing is lost,
each context is computed once again, by whoever is up, and at most once more where its session left
a busy worker; then the fleet works as before. Engines with a cost (`tests.support.gateway.engine`),
all of them processes. The full form, which also holds the rate of turns:

OWNERSERVE_RESTART_AGENTS=120 pytest -s tests/gateway/test_fleet_restart.py
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.gateway.agents import Agent
from tests.support.gateway.engine import EngineProcess, engine_processes
from tests.support.gateway.process import GatewayProcess, gateway_process

pytestmark = pytest.mark.slow

AGENTS = int(os.environ.get("OWNERSERVE_RESTART_AGENTS", "32"))
IS_FULL = "OWNERSERVE_RESTART_AGENTS" in os.environ
WORKERS, TURNS = 4, 4
CONTEXT_BYTES = (400 if IS_FULL else 80) << 10
GROWTH_BYTES = 2048
SEATS, QUEUE = 8, 64
COST = ("--token-us", "5", "--seats", str(SEATS), "--queue", str(QUEUE))
"""200,000 prompt tokens a second; who comes when so many wait is told 429."""


def said(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        told: dict[str, object] = json.loads(answer.read())
        return told


def counts(engines: Sequence[EngineProcess], name: str) -> list[int]:
    every = [said(f"http://127.0.0.1:{engine.port}/counts") for engine in engines]
    return [int(str(one.get(name, 0))) for one in every]


async def scenario(engines: Sequence[EngineProcess], running: GatewayProcess) -> None:
    port = int(running.data_url.rpartition(":")[2])
    agents = [
        Agent(
            f"agent{n}",
            port,
            context=(f"{n:08d}" * (CONTEXT_BYTES // 8)).encode(),
            growth=GROWTH_BYTES,
        )
        for n in range(AGENTS)
    ]
    await asyncio.gather(*(agent.turn() for agent in agents))  # every context is computed
    began_s = time.monotonic()
    await asyncio.gather(*(agent.play(TURNS) for agent in agents))
    before = AGENTS * TURNS / (time.monotonic() - began_s)
    playing = [asyncio.ensure_future(agent.play(3 * TURNS)) for agent in agents]
    while sum(len(agent.turns) for agent in agents) < AGENTS * (TURNS + 2):
        await asyncio.sleep(0.01)
    for engine in engines:
        engine.kill()
    killed_s = time.monotonic()
    while sum(bool(agent.met) for agent in agents) < AGENTS // 2:
        await asyncio.sleep(0.01)
    await asyncio.gather(*(asyncio.to_thread(engine.start) for engine in engines))
    back_s = time.monotonic()
    held = sum(len(agent.context) for agent in agents) // 4
    await asyncio.gather(*playing)
    ended_s = time.monotonic()

    met = sum((agent.met for agent in agents), Counter())
    assert all(len(agent.turns) == 1 + 4 * TURNS for agent in agents), met
    computed, at_once = counts(engines, "computed_tokens"), counts(engines, "running_max")
    grown = sum(len(agent.context) for agent in agents) // 4 - held
    again = (sum(computed) - grown) / held
    after = [[turn for turn in agent.turns if turn.at_s > killed_s] for agent in agents]
    # Some have a turn, and all that they have left, at the first that is back.
    first = [min((turn.at_s for turn in turns), default=back_s) - back_s for turns in after]
    whole_s = max(0.0, *first)
    steady = [turn for turns in after for turn in turns if turn.at_s > back_s + whole_s]
    goodput = len(steady) / max(ended_s - back_s - whole_s, 1e-9)
    status = said(f"{running.admin_url}/status")
    print(
        f"\n{AGENTS} agents, {held} tokens in all, {WORKERS} workers: down for"
        f" {back_s - killed_s:.1f} s; after it each had a turn within {whole_s:.1f} s, half of"
        f" them within {sorted(first)[AGENTS // 2]:.1f} s; computed again {again:.2f} of what was"
        f" held, by worker {computed}, at most {max(at_once)} at once; turns a second"
        f" {before:.1f} before, {goodput:.1f} after; tries at most"
        f" {max(turn.tries for turns in after for turn in turns)}, met {dict(met)}, refused"
        f" {counts(engines, 'refused')}, {status['requests']}, reasons {status['reasons']}"
    )
    # Once by whoever is up first, and again where a session leaves that one, once in T_cool
    # (docs/routing.md); the rest for turns that were broken off.
    assert again <= 2.5
    assert max(at_once) <= SEATS
    counted = status["requests"]
    assert isinstance(counted, dict)
    assert counted["received"] == counted["done"] + counted["rejected"]
    if IS_FULL:
        assert max(computed) < 2 * sum(computed) / WORKERS, "nobody is left to do it alone"
        assert goodput >= 0.8 * before


def test_a_fleet_that_comes_back_at_once_does_not_fall_again(tmp_path: Path) -> None:
    with (
        engine_processes(WORKERS, *COST) as engines,
        gateway_process(tmp_path, [engine.port for engine in engines]) as running,
    ):
        asyncio.run(asyncio.wait_for(scenario(engines, running), 500))
