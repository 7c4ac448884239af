"""Real `vllm serve`: the gateway in front and the `openai` client in an agent's loop with SSE; our
routes on its own port."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from ownerserve.kv.wire.headers import read_answer_line
from ownerserve.kv.wire.status import read_status
from tests.gateway.test_tenants import ACME, FILE, GLOBEX, PARTNER, written
from tests.support.metric_lines import summed
from tests.support.vllm import connectors, tiny
from tests.support.vllm.installed import distribution
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import SERVE_S, WarmServers, gateway, serve
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32


def say(client: openai.OpenAI, messages: list[dict[str, str]]) -> tuple[str, int]:
    """One streamed turn: its text and how many prompt tokens were cached."""
    text, cached = "", 0
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-session-id": "agent-1"},
    )
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return text, cached


def talk(url: str, turns: int) -> tuple[list[str], list[int]]:
    """An agent's loop: a task, answers, tool results; each turn sends all that came before."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    messages = [{"role": "system", "content": "You mend programs. " * 12}]
    texts, cached = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Output of step {turn}: " + "ok, " * 40})
        text, hit = say(client, messages)
        messages.append({"role": "assistant", "content": text})
        texts.append(text)
        cached.append(hit)
    client.close()
    return texts, cached


def test_an_agents_loop_goes_on_over_a_restart_of_its_worker(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path
) -> None:
    model = rig.checkpoint("gemma3")
    connector = connectors.ours(store)
    with warm.serve(model, connector, tmp_path / "first.log") as worker:
        with gateway([worker.url], tmp_path / "one") as (url, _):
            before, hits = talk(url, turns=4)
        assert min(hits[1:]) > 0, "a later turn finds what the turn before it left"
    with warm.serve(model, connector, tmp_path / "second.log") as worker:
        with gateway([worker.url], tmp_path / "two") as (url, _):
            after, hits = talk(url, turns=4)
        assert hits[0] >= 256, "the first turn is restored from the store, in another process"
    assert after == before


def test_our_routes_answer_on_vllms_own_port(rig: Rig, store: Path, tmp_path: Path) -> None:
    """Through the whole server: its plug-in loader, the engine core in another process, back."""
    model, installed = rig.checkpoint("qwen3"), distribution(tmp_path / "site")
    connector = connectors.ours(store, worker_id="gpu-0")
    with serve(model, connector, tmp_path / "vllm.log", installed=installed) as server:
        texts, _ = talk(server.url, turns=2)
        assert all(texts)
        with httpx.Client(base_url=f"{server.url}/ownerserve", timeout=30) as desk:
            read = read_status(desk.get("/status").content)
            assert (read.status is not None, read.problems) == (True, ())
            assert read.status is not None
            load, profile = msgspec.to_builtins(read.status.load), read.status.profile
            assert load["kv_bytes_free"] + load["kv_bytes_evictable"] == load["kv_bytes_total"] > 0
            assert profile.models == ("tiny",)
            assert profile.actions is not None and "tail_recompute" in profile.actions
            assert profile.speed is not None and profile.speed.step_measured_s is not None
            assert read.status.unit.worker == "gpu-0"
            assert (load["running_sequences"], load["waiting_sequences"]) == (0, 0)
            assert time.time() - load["as_of_s"] < SERVE_S
            admitted = desk.post("/admit", json={"tokens": 1000})
            assert (admitted.status_code, admitted.json()["type"]) == (200, "admit")
            refused = desk.post("/admit", json={"tokens": 5000})
            assert (refused.status_code, refused.json()["reason"]) == (429, "too_long")
            released = desk.post("/release", json={"session_id": "agent-1"})
            assert (released.status_code, released.json()["type"]) == (200, "released")
            assert desk.post("/release", json={"session": "agent-1"}).status_code == 400
        again, _ = talk(server.url, turns=2)
        assert again == texts
        told = httpx.get(f"{server.url}/health", timeout=30).headers["x-ownerserve-answer"]
        on_health = read_answer_line(told.encode()).line
        assert on_health.unit is not None and on_health.load is not None
        assert on_health.unit.incarnation == read.status.unit.incarnation
        unasked = "--stream-usage", "leave"
        with gateway([server.url], tmp_path / "gateway", *unasked) as (url, admin):
            what_came_of_prompts_is_heard(url, admin)
            [decided] = httpx.get(f"{admin}/decisions?last=1", timeout=30).json()["decisions"]
            assert counter(admin, 'ownerserve_gateway_places_total{outcome="admitted"}') >= 1
        what_is_held_is_answered(server.url, decided["session"])
        keys = written(tmp_path, FILE)
        with gateway([server.url], tmp_path / "tenants", "--tenants-file", str(keys)) as (url, _):
            tenants_are_parted(url, server.url)


def what_came_of_prompts_is_heard(url: str, admin: str) -> None:
    """Answers that are streamed without `usage`: what the device holds and what was lost is known
    by the lines on them alone."""
    prompt, expected = tiny.prompt(700, seed=11), []
    for turn in range(3):
        expected.append(streamed(url, prompt))
        prompt += tiny.prompt(256, seed=turn)
    blocks = [(700 + 256 * turn) // B * B for turn in range(3)]
    assert expected == [0, *blocks[:2]]
    assert counter(admin, "ownerserve_gateway_reseeds_total") == 0
    streamed(url, prompt, cache_salt="its state is another's")
    assert counter(admin, "ownerserve_gateway_reseeds_total") == 1
    assert counter(admin, "ownerserve_gateway_lost_tokens_total") >= blocks[2]


def tenants_are_parted(url: str, worker: str) -> None:
    """In each dialect, by vLLM's own count of prompt tokens that it found: on its device, and by
    the connector."""
    text = "Rivers run to the sea, and seas to the sky. " * 12
    said = [{"role": "user", "content": text}]
    dialects: dict[str, dict[str, object]] = {
        "chat/completions": {"messages": said},
        "completions": {"prompt": "once " + text},
        "responses": {"input": "twice " + text},
        "messages": {"messages": said, "system": "thrice"},
    }
    names = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
    for path, more in dialects.items():
        size = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {"model": "tiny", size: 4, "temperature": 0.0, **more}
        found = []
        for key in (ACME, GLOBEX, ACME, PARTNER):
            before = sum(counter(worker, name) for name in names)
            headers = {"x-api-key": key}
            answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=120)
            assert answer.status_code == 200, (path, answer.text)
            found.append(sum(counter(worker, name) for name in names) - before)
        assert found[:2] == [0, 0] and found[2] == found[3] >= 256, (path, found)


def what_is_held_is_answered(url: str, session: str) -> None:
    """Of a session whose turns have ended, and of one that nobody knows."""

    def restorable(name: str) -> int:
        wanted = {"tokens": 1000, "session_id": name}
        answer = httpx.post(f"{url}/ownerserve/admit", json=wanted, timeout=30)
        assert (answer.status_code, answer.json()["type"]) == (200, "admit")
        return int(answer.json()["restorable_tokens"])

    until(lambda: restorable(session) >= 1212 // B * B)
    assert restorable("9" * 32) == 0


def streamed(url: str, prompt: list[int], **more: str) -> int:
    """A turn of a session; how many of its tokens the gateway expected to be there."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    headers = {"x-session-id": "agent-2"}
    answer = httpx.post(f"{url}/v1/completions", json=body | more, headers=headers, timeout=120)
    assert answer.status_code == 200 and '"usage":{' not in answer.text, answer.text
    assert "x-ownerserve-answer" not in answer.headers, "it goes no further than the gateway"
    return int(answer.headers["x-ownerserve-expected-cached-tokens"])


def counter(admin: str, name: str) -> float:
    return summed(httpx.get(f"{admin}/metrics", timeout=30).text, name)
