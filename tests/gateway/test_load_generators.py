"""Two load generators that users bring, each in an environment of its own (`make test-clients`),
against a gateway over two workers with the reference engine: every request is answered, and nobody
counts an error."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import ROOT
from tests.support.gateway.commands import running

pytest.importorskip("torch")

from ownerserve.engines.hf.model.tokenizer import byte_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL, REQUESTS = "tiny-qwen3", 40
WAIT_S = 300.0


class Fleet:
    """A gateway over two workers, and what a client's own tokenizer is read from."""

    def __init__(self, data: str, admin: str, tokenizer: Path) -> None:
        self.url = data
        self.tokenizer = tokenizer
        self._admin = admin

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self._admin}/status", timeout=WAIT_S).json()
        return told


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("fleet")
    byte_tokenizer().save_pretrained(home / "tokenizer")
    with ExitStack() as stack:
        named: list[str] = []
        for number in range(2):
            worker = ("worker", "--model", MODEL, "--port", "0")
            (url,), _ = stack.enter_context(running(home / f"worker{number}", *worker))
            named += ("--worker", url)
        command = ("gateway", "--port", "0", "--admin-port", "0", *named)
        (data, admin), _ = stack.enter_context(running(home / "gateway", *command))
        yield Fleet(data, admin, home / "tokenizer")


def program(name: str, version: str) -> Path:
    """The program of an environment that `make test-clients` makes."""
    folder = ROOT / f".venv-{name}"
    if not (folder / f".{name}-{version}").exists():
        pytest.skip(f"{name} {version} is not installed: make test-clients")
    return folder / "bin" / name


def played(fleet: Fleet, *command: str) -> None:
    """Run the command; the gateway must have had `REQUESTS` turns of it and more, at both workers,
    and none that went wrong."""
    before = fleet.status()["requests"]["finished"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    status = fleet.status()
    counts = status["requests"]
    assert counts["finished"] - before >= REQUESTS
    assert (counts["broken"], counts["rejected"], counts["aborted"]) == (0, 0, 0)
    assert not status["failures"] and not status["downs"] and not status["refusals"]
    assert set(status["errors"]) <= {"unknown_path"}  # they also ask where metrics may be


@pytest.mark.parametrize("kind", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(fleet: Fleet, tmp_path: Path, kind: str) -> None:
    command = program("guidellm", "0.8.1")
    told = tmp_path / "told.json"
    played(
        fleet, str(command), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={fleet.url},model={MODEL},request_format={kind}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={fleet.tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16,turns=4",
        "--output", f"kind=json,path={told}",
    )  # fmt: skip
    (ran,) = json.loads(told.read_text())["benchmarks"]
    totals = ran["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(fleet: Fleet, tmp_path: Path, kind: str) -> None:
    command = program("aiperf", "0.13.0")
    turns = ("--conversation-turn-mean", "4") if kind == "chat" else ("--use-legacy-max-tokens",)
    sessions = str(REQUESTS // 4) if kind == "chat" else str(REQUESTS)
    played(
        fleet, str(command), "profile", "--model", MODEL, "--url", fleet.url,
        "--endpoint-type", kind, "--streaming", "--tokenizer", str(fleet.tokenizer),
        "--concurrency", "4", "--num-conversations", sessions, *turns,
        "--isl", "200", "--osl", "16", "--extra-inputs", "ignore_eos:true",
        "--ui-type", "none", "--artifact-dir", str(tmp_path),
    )  # fmt: skip
    told = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == REQUESTS
    assert not told["error_summary"] and not told["was_cancelled"]
