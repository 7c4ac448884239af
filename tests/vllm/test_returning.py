"""Sessions return to the vLLM worker whose store has their state: real servers, a real gateway."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.net import free_port
from tests.support.vllm import connectors
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import PROMPT_TOKENS, Agent, WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm


def words_read(admin: str) -> dict[str, float]:
    """How many words of each worker's inventory the gateway has read."""
    lines = httpx.get(f"{admin}/metrics", timeout=30).text.splitlines()
    start = "ownerserve_gateway_worker_inventory_total"
    found = [line for line in lines if line.startswith(start) and 'kind="words"' in line]
    return {line.split('worker="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def words_of(url: str) -> list[dict[str, Any]]:
    """What a worker says of all that it has."""
    page = httpx.get(f"{url}/ownerserve/inventory?after=0", timeout=30).json()
    words: list[dict[str, Any]] = page["words"]
    return words


def sessions_on(url: str, tier: str) -> int:
    return sum(word["is"] == "has" and word["tier"] == tier for word in words_of(url))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sessions_return_whichever_worker_came_up_first(
    rig: Rig, warm: WarmServers, tmp_path: Path, order: tuple[int, int]
) -> None:
    """One worker is told to end, the other is killed; both begin anew over their stores. One of
    them has ours as a child of MultiConnector, whose other child keeps nothing over a life. Both
    state equal prices: one that measures itself slower than the other loses sessions to it."""
    model = rig.checkpoint("qwen3")
    ports = [free_port(), free_port()]

    def start(number: int, life: int) -> Any:
        connector = connectors.ours(tmp_path / f"store-{number}")
        if number == 1:
            other = connectors.offloading(tmp_path / f"offloaded-{life}")
            connector = connectors.multi(connector, other)
        log = tmp_path / f"vllm-{number}-{life}.log"
        return warm.serve(model, connector, log, port=ports[number], prices="assumed")

    with ExitStack() as all_, ExitStack() as first, ExitStack() as second:
        stacks = (first, second)
        servers = [stack.enter_context(start(n, 0)) for n, stack in enumerate(stacks)]
        urls = [server.url for server in servers]
        url, admin = all_.enter_context(gateway(urls, tmp_path / "gateway"))
        agents = [Agent(url, f"s{n}", n) for n in range(4)]
        homes = [agent.turn()["worker"] for agent in agents]
        assert len(set(homes)) == 2
        until(lambda: sum(sessions_on(one, "disk") for one in urls) == 4)
        servers[order[0]].kill()
        for number in order:
            stacks[number].close()
            name = f"127.0.0.1:{ports[number]}"
            before = words_read(admin)[name]
            stacks[number].enter_context(start(number, 1))
            words = len(words_of(urls[number]))
            assert words >= sum(home == name for home in homes)
            until(lambda: words_read(admin)[name] - before >= words)  # noqa: B023
        for number in order[::-1]:
            for agent, home in zip(agents, homes, strict=True):
                if home.endswith(str(ports[number])):
                    turn = agent.turn()
                    assert (turn["worker"], turn["reason"]) == (home, "recovered"), turn
                    assert turn["action"] == "tail_recompute", turn
                    assert int(turn["cached"]) >= PROMPT_TOKENS // 32 * 32 - 32
                    # Guessed from bytes: vLLM's answers do not say how far a prompt is known.
                    assert 0 < int(turn["expected-cached-tokens"]) <= int(turn["cached"]) + 32
