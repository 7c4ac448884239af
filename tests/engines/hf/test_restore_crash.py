"""kill -9 while a session is being copied to the store: the next life serves what is sound.

Real processes. Slow for what they prove, so marked; run with `pytest -m crash`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import importing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.store.disk.snapshot import StoreSnapshot  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

PROMPT = text(3000, seed=4)
WAIT_S = 300.0


class Life:
    """One worker process over a store."""

    def __init__(self, store: Path) -> None:
        ready = store.with_suffix(".url")
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hf.slow_worker", store, ready],
            env=importing(OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: ready.exists() or self.process.poll() is not None, within_s=WAIT_S)
            assert self.process.poll() is None
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.http = httpx.Client(base_url=ready.read_text().strip(), timeout=WAIT_S)

    def complete(self, prompt: list[int]) -> tuple[dict[str, Any], httpx.Headers]:
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "session_id": "s",
            "return_token_ids": True,
        }
        answer = self.http.post("/v1/completions", json=body).raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice, answer.headers

    def kept(self) -> int:
        """Records in the store so far."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith('ownerserve_spill_records_total{outcome="kept"}'):
                return int(float(line.rsplit(" ", 1)[1]))
        return 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.http.close()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    started: list[Life] = []
    yield started
    for life in started:
        if life.process.poll() is None:
            life.kill()


@pytest.mark.parametrize("records", [5, 20, 40])
def test_a_life_after_kill_9_in_mid_spill(tmp_path: Path, lives: list[Life], records: int) -> None:
    store = tmp_path / "store"
    lives.append(Life(store))
    first, headers = lives[0].complete(PROMPT)
    assert headers["x-ownerserve-mode"] == "cold_prefill"
    until(lambda: lives[0].kept() >= records, within_s=WAIT_S)
    lives[0].kill()
    snapshot = StoreSnapshot(store)
    assert records <= sum(1 for _ in snapshot.entries()) < 3 * 24, "in the middle of it"
    snapshot.close()

    lives.append(Life(store))
    prompt = [*PROMPT, *first["token_ids"], *text(30, seed=6)]
    second, headers = lives[1].complete(prompt)
    lives[1].kill()
    assert headers["x-ownerserve-mode"] == "fetch"
    assert int(headers["x-ownerserve-cached-tokens"]) > 0
    tokens, logprobs = second["token_ids"], second["logprobs"]["token_logprobs"]
    rows = reference("tiny-v4", prompt, tokens)
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        assert abs(float(row[token]) - logprob) <= TOLERANCE
