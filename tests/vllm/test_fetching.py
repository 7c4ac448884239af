"""A gateway has a vLLM server go on from what another one has stored: two real servers, a real
gateway, and nobody but it who says where the state is."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ownerserve.kv.wire.headers import read_brought
from ownerserve.node.transfers.counting import COUNTED
from tests.support.vllm import connectors, tiny
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import PROMPT_TOKENS, Agent, Server, WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
FAMILY = "qwen3"
HELD = PROMPT_TOKENS // B * B
ADDED = 40
"""Tokens that an agent says after each answer."""
COUNTERS = {f"{metric.name}_total" for metric in COUNTED}
OF_VLLM = {"engine", "model_name"}
"""Labels of all of vLLM's metrics."""
BROUGHT, LENT = ("ownerserve_brought_total", "brought"), ("ownerserve_lends_total", "returned")
READ, STAGED = ("ownerserve_peer_read_bytes_total", ""), ("ownerserve_staged_bytes_total", "")


def stored(admin: str, worker: str) -> int:
    """The tokens of the only session that the gateway knows to lie in the worker's store."""
    (session,) = httpx.get(f"{admin}/sessions?last=10", timeout=30).json()["sessions"]
    copies = [(one["worker"], one["tier"], one["tokens"]) for one in session["copies"]]
    return max((tokens for at, tier, tokens in copies if (at, tier) == (worker, "disk")), default=0)


def tiers_of(url: str) -> set[str]:
    """What a server states prices of loads from."""
    profile = httpx.get(f"{url}/ownerserve/status", timeout=30).json()["profile"]
    return {tier["name"] for tier in profile["tiers"]}


def counted(server: Server) -> dict[tuple[str, str], float]:
    """What a server says of transfers, by the counter's name and its label. vLLM tells it with a
    step of its engine, so that one is made first, for nobody."""
    body = {"model": "tiny", "prompt": tiny.prompt(8, seed=7), "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {
        (sample.name, "".join(sample.labels[label] for label in sample.labels.keys() - OF_VLLM)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in COUNTERS
    }


def test_a_session_of_a_drained_server_goes_on_elsewhere_with_its_state(
    rig: Rig, warm: WarmServers, tmp_path: Path
) -> None:
    model = rig.checkpoint(FAMILY)
    with ExitStack() as all_:
        servers: dict[str, Server] = {}
        for name in ("one", "other"):
            connector = connectors.ours(tmp_path / name, worker_id=name)
            server = all_.enter_context(warm.serve(model, connector, tmp_path / f"{name}.log"))
            servers[server.url.removeprefix("http://")] = server
        urls = [server.url for server in servers.values()]
        assert all("peer" in tiers_of(one) for one in urls), "the way there has its price"
        url, admin = all_.enter_context(gateway(urls, tmp_path / "gateway"))
        agent = Agent(url, "agent", 1)
        home = agent.turn()["worker"]
        (away,) = servers.keys() - {home}
        until(lambda: stored(admin, home) >= HELD, within_s=120, what="the news of what is stored")
        httpx.post(f"{admin}/workers/{home}/drain", timeout=30).raise_for_status()

        prompt = list(agent.tokens)
        turn = agent.turn(answer_tokens=16)
        assert (turn["worker"], turn["action"]) == (away, "artifact_fetch"), turn
        assert turn["mode"] == "fetch", turn
        assert read_brought(turn["brought-tokens"])["peer"] >= HELD, turn
        assert int(turn["cached"]) >= HELD, turn
        assert agent.tokens[len(prompt) : -ADDED] == rig.cold(FAMILY, prompt).tokens

        until(lambda: LENT in counted(servers[home]), within_s=120, what="the lend is counted")
        here, there = counted(servers[away]), counted(servers[home])
        assert (here[BROUGHT], there[LENT]) == (1, 1)
        assert here["ownerserve_peer_looks_total", "found"] >= 1
        by_road = {of for of in here if of[0] == "ownerserve_brought_bytes_total"}
        assert here[READ] == sum(here[of] for of in by_road) == there[STAGED] > 0
        assert not {BROUGHT, READ} & there.keys() and not {LENT, STAGED} & here.keys()
