"""Real `vllm serve`: the gateway in front and the `openai` client in an agent's loop with SSE; our
routes on its own port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import connectors
import httpx
import msgspec
import openai
import pytest
from fleet import ROOT, vllm_python
from rig import Rig

from ownerserve.cli.demo.processes import Child

pytestmark = pytest.mark.vllm

SERVE_S = 240.0
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"]
FLAGS += ["--num-gpu-blocks-override", "300", "--kv-cache-memory-bytes", str(1 << 30)]
FLAGS += ["--generation-config", "vllm", "--served-model-name", "tiny"]
FLAGS += ["--enable-prompt-tokens-details"]


@contextmanager
def serve(
    model: Path, connector: dict[str, Any], log: Path, *, installed: Path | None = None
) -> Iterator[str]:
    """The real OpenAI server as an operator starts it; yields its URL. `installed`: a folder with
    our distribution, whose plug-ins are allowed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config = msgspec.json.encode(connector["kv_transfer_config"]).decode()
    # `vllm serve` of the CPU wheel asks for a package called vllm and dies; this is its server.
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), *FLAGS]
    command += ["--kv-transfer-config", config]
    path = [ROOT / "src", *([installed] if installed else [])]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **({"VLLM_PLUGINS": "ownerserve"} if installed else {}),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **settings}, start_new_session=True
        )
        try:
            _wait_healthy(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVE_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"vllm serve did not come up\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


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


@contextmanager
def gateway(worker: str, folder: Path) -> Iterator[str]:
    folder.mkdir()
    child = Child("gateway", ["gateway", "--worker", worker], folder)
    try:
        yield child.wait_ready(60)[0]
    finally:
        child.stop()


def test_an_agents_loop_goes_on_over_a_restart_of_its_worker(
    rig: Rig, store: Path, tmp_path: Path
) -> None:
    model = rig.checkpoint("gemma3")
    connector = connectors.ours(store)
    with serve(model, connector, tmp_path / "first.log") as worker:
        with gateway(worker, tmp_path / "one") as url:
            before, hits = talk(url, turns=4)
        assert min(hits[1:]) > 0, "a later turn finds what the turn before it left"
    with serve(model, connector, tmp_path / "second.log") as worker:
        with gateway(worker, tmp_path / "two") as url:
            after, hits = talk(url, turns=4)
        assert hits[0] >= 256, "the first turn is restored from the store, in another process"
    assert after == before


def distribution(folder: Path) -> Path:
    """What `pip install ownerserve` leaves behind of entry points; the folder to look in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"ownerserve-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: ownerserve\nVersion: {project['version']}\n")
    group = "vllm.endpoint_plugins"
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return folder


def test_our_routes_answer_on_vllms_own_port(rig: Rig, store: Path, tmp_path: Path) -> None:
    """Through the whole server: its plug-in loader, the engine core in another process, back."""
    model, installed = rig.checkpoint("qwen3"), distribution(tmp_path / "site")
    connector = connectors.ours(store)
    with serve(model, connector, tmp_path / "vllm.log", installed=installed) as url:
        texts, _ = talk(url, turns=2)
        assert all(texts)
        with httpx.Client(base_url=f"{url}/ownerserve", timeout=30) as desk:
            load = desk.get("/status").json()
            assert load["unit"][0] == "tiny"
            assert load["kv_bytes_total"] > load["kv_bytes_free"] / 2 > 0
            assert (load["running_sequences"], load["waiting_sequences"]) == (0, 0)
            assert time.time() - load["as_of"] < SERVE_S
            admitted = desk.post("/admit", json={"tokens": 1000, "session_id": "agent-1"})
            assert (admitted.status_code, admitted.json()["type"]) == (200, "admit")
            refused = desk.post("/admit", json={"tokens": 5000, "session_id": "agent-1"})
            assert (refused.status_code, refused.json()["reason"]) == (429, "too_long")
            released = desk.post("/release", json={"session_id": "agent-1"})
            assert (released.status_code, released.json()["type"]) == (200, "released")
            assert desk.post("/release", json={"session": "agent-1"}).status_code == 400
        again, _ = talk(url, turns=2)
        assert again == texts
