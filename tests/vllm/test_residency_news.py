"""What goes from real `vllm serve`'s pool is heard by gateways as it goes, and turns go by it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ownerserve.kv.prefix import PrefixChain, pack
from ownerserve.kv.wire.inventory import Has, decode_page
from tests.support.vllm import connectors, tiny
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import PROMPT_TOKENS, Agent, Server, WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
ALL_IN = "--seats", "0"
"""All sessions are let in at once: workers are small here."""
LONGEST = 2040
"""Tokens of the longest prompt that is served."""


def asked(admin: str, what: str) -> Any:
    return httpx.get(f"{admin}/{what}", timeout=30).json()


def on_device(admin: str, worker: Server) -> dict[str, int]:
    """Tokens of each session that a gateway believes to lie on the worker's device."""
    name = worker.url.removeprefix("http://")
    return {
        one["session"]: copy["tokens"]
        for one in asked(admin, "sessions?last=100")["sessions"]
        for copy in one["copies"]
        if (copy["worker"], copy["tier"]) == (name, "device")
    }


def named(worker: Server) -> str:
    """The digest under which the worker holds the only session on its device."""
    page = decode_page(httpx.get(f"{worker.url}/ownerserve/inventory", timeout=30).content)
    assert page is not None
    [word] = (word for word in page.words if isinstance(word, Has) and word.tier == "device")
    return word.prefix_hash


def last_decision(admin: str) -> dict[str, Any]:
    [decided] = asked(admin, "decisions?last=1")["decisions"]
    assert isinstance(decided, dict)
    return decided


def fill(worker: Server, *, seed: int) -> None:
    """A prompt of nobody's, of which no gateway hears."""
    body = {"model": "tiny", "prompt": tiny.prompt(LONGEST, seed=seed), "max_tokens": 1}
    answer = httpx.post(f"{worker.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def test_what_vllm_evicts_changes_what_a_gateway_expects(
    rig: Rig, warm: WarmServers, tmp_path: Path
) -> None:
    """Two gateways before one worker with room for one long prompt. All turns go through the one
    that asks for no news; the other one knows of them by news alone."""
    model, connector = rig.checkpoint("qwen3"), connectors.ours(tmp_path / "store")
    room = "--num-gpu-blocks-override", "66"
    with ExitStack() as all_:
        worker = all_.enter_context(warm.serve(model, connector, tmp_path / "vllm.log", *room))
        told, admin = all_.enter_context(gateway([worker.url], tmp_path / "told", *ALL_IN))
        blind = *ALL_IN, "--news-ms", "none"
        url, deaf = all_.enter_context(gateway([worker.url], tmp_path / "deaf", *blind))
        agent = Agent(url, "a", 1)
        agent.turn(answer_tokens=B + 8)
        held = (PROMPT_TOKENS + B) // B * B
        until(lambda: on_device(admin, worker), what="the news that a turn left its state")
        [(name, tokens)] = on_device(admin, worker).items()
        assert tokens == held
        assert named(worker) == PrefixChain(B).extend(pack(agent.tokens[:held]))[-1].hex()
        believed = on_device(deaf, worker)
        assert believed[name] >= held, "by the answer of the turn"
        for seed in (7, 8):
            fill(worker, seed=seed)
        until(lambda: on_device(admin, worker).get(name, 0) <= 2 * B, what="the news that it went")
        assert on_device(deaf, worker) == believed, "it is not told otherwise"
        agent.url = told
        answer, decided = agent.turn(), last_decision(admin)
        assert decided["source"]["tier"] == "disk", decided
        for way in decided["priced"]:  # what is left of it on the device counts, and no more
            assert way["action"] == "tail_recompute" or way["cached_tokens"] <= 2 * B, decided
        assert int(answer["cached"]) >= held


def test_what_a_session_that_moved_left_behind_goes_first(
    rig: Rig, warm: WarmServers, tmp_path: Path
) -> None:
    """`stays` was used before `moves`, on the same worker, whose device has room for both and some
    forty blocks. `moves` then takes its next turn elsewhere, and a long prompt needs its room."""
    model = rig.checkpoint("qwen3")
    with ExitStack() as all_:
        servers = []
        for number in range(2):
            connector = connectors.ours(
                tmp_path / f"store-{number}", soft_reference={"pool_fraction": 1.0}
            )
            log, room = tmp_path / f"vllm-{number}.log", ("--num-gpu-blocks-override", "120")
            servers.append(all_.enter_context(warm.serve(model, connector, log, *room)))
        urls, words = [server.url for server in servers], (*ALL_IN, "--policy", "round_robin")
        url, admin = all_.enter_context(gateway(urls, tmp_path / "gateway", *words))
        stays, other, moves = (Agent(url, name, at) for at, name in enumerate(("s", "o", "m"), 1))
        names = {}
        for agent in (stays, other, moves):
            at = agent.turn()["worker"]
            names[agent.name] = last_decision(admin)["session"], at
        (kept, home), (moved, there) = names["s"], names["m"]
        assert home == there, "every other turn"
        [former] = [server for server in servers if server.url.endswith(home)]
        assert moves.turn()["worker"] != home
        until(lambda: released(admin, "let_go") == 1, what="its former worker to hear of it")
        held = PROMPT_TOKENS // B * B
        until(lambda: min(on_device(admin, former).get(name, 0) for name in (kept, moved)) >= held)
        before = on_device(admin, former)
        fill(former, seed=9)
        until(lambda: on_device(admin, former) != before, what="the news of what went")
        after = on_device(admin, former)
        assert after[kept] == before[kept]
        assert after.get(moved, 0) < held


def released(admin: str, outcome: str) -> float:
    """How many requests to hand over, or to let go, ended so."""
    lines = httpx.get(f"{admin}/metrics", timeout=30).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if f'releases_total{{outcome="{outcome}"' in line
    )
