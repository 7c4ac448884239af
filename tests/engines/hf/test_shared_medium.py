"""Workers that share a medium: what one has kept, another restores. As an operator runs them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.children import importing  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.metric_lines import summed  # noqa: E402
from tests.support.store.servers import MooncakeCluster  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = text(500, seed=4)
WAIT_S = 300.0


@contextmanager
def worker(home: Path, *flags: str) -> Iterator[httpx.Client]:
    """`ownerserve worker` of the tiny V4 with `flags`, stopped as Ctrl-C stops it."""
    home.mkdir()
    ready, log = home / "url", home / "log"
    command = [sys.executable, "-m", "tests.support.hf.assumed", "worker", "--port", "0"]
    command += ["--ready-file", str(ready), "--spill-after", "0.02", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=importing(OMP_NUM_THREADS="1"), stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        with httpx.Client(base_url=ready.read_text().strip(), timeout=WAIT_S) as http:
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def complete(http: httpx.Client, prompt: list[int]) -> tuple[dict[str, Any], httpx.Headers]:
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 1,
        "session_id": "s",
        "return_token_ids": True,
    }
    answer = http.post("/v1/completions", json=body).raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice, answer.headers


def kept(http: httpx.Client) -> float:
    """Records in the store so far."""
    start = 'ownerserve_spill_records_total{outcome="kept"}'
    return summed(http.get("/metrics").text, start)


def wait_until_kept(http: httpx.Client) -> None:
    until, before = time.monotonic() + WAIT_S, -1.0
    while not 0 < (now := kept(http)) == before:
        assert time.monotonic() < until, "nothing was kept"
        before = now
        time.sleep(0.5)


@pytest.mark.parametrize(
    "own",
    [
        ("--store", "store", "--host-cache", "16MiB"),
        ("--host-cache", "16MiB", "--write", "write-back"),
    ],
    ids=["written-through", "written-back"],
)
def test_a_second_worker_goes_on_from_what_the_first_has_kept(
    tmp_path: Path, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    goes_on_over(str(tmp_path / "shared"), tmp_path, own)


@pytest.mark.skipif(find_spec("mooncake") is None, reason="needs the extra [mooncake]")
def test_a_second_worker_goes_on_from_what_a_mooncake_store_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers lend no memory to the pool: what they leave there stays."""
    cluster = MooncakeCluster(tmp_path)
    try:
        monkeypatch.setenv("MOONCAKE_MASTER", cluster.address)
        monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1")
        monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
        monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "32MB")
        goes_on_over("mooncake://test", tmp_path, ("--host-cache", "16MiB"))
    finally:
        cluster.close()


def goes_on_over(medium: str, tmp_path: Path, own: tuple[str, ...]) -> None:
    """A worker keeps a session on the medium; another, which never saw it, restores it exactly."""
    shared = ("--remote", medium)
    with worker(tmp_path / "one", *shared, *own) as http:
        first, _ = complete(http, PROMPT)
        wait_until_kept(http)
    prompt = [*PROMPT, *first["token_ids"], *text(40, seed=9)]
    with worker(tmp_path / "two", *shared) as http:
        second, headers = complete(http, prompt)
    assert headers["x-ownerserve-mode"] == "fetch"
    assert int(headers["x-ownerserve-cached-tokens"]) > 400
    truth = reference("tiny-v4", prompt, second["token_ids"])
    found = second["logprobs"]["token_logprobs"]
    worst = max(
        abs(float(row[token]) - value)
        for row, token, value in zip(truth, second["token_ids"], found, strict=True)
    )
    assert worst < TOLERANCE
