"""Two gateways before two real workers, with one directory between them: as an operator runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "directory"))

from servers import Server, find_binary

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAIT_S = 180.0
BOUND_S = 30.0
"""Until a session is bound: off the request path, and an empty directory first waits one lease
(5 s), because it cannot know whether it is new or has forgotten."""


@contextmanager
def running(home: Path, *command: str) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """`ownerserve COMMAND` until SIGTERM, and the lines of its ready file."""
    home.mkdir()
    ready, log = home / "ready", home / "log"
    words = [sys.executable, "-m", "ownerserve.cli.main", *command, "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        yield ready.read_text().split(), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


@contextmanager
def directory(kind: str, home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes] | Server]]:
    """A directory that two gateways can share, and what to kill."""
    if kind == "tcp":
        with running(home, "directory", "serve", "--new-fleet") as (lines, process):
            yield lines[0], process
        return
    home.mkdir()
    server = Server(home)
    try:
        yield server.url, server
    finally:
        server.stop()


def turn(http: httpx.Client, messages: list[dict[str, str]]) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
    answer.raise_for_status()
    said = answer.json()["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and what then? " * 10},
    ]
    return answer


def is_bound(admin_url: str) -> bool:
    """Has the directory granted this gateway's session to where it runs?"""
    return (
        'ownerserve_directory_answers_total{answer="bound"}'
        in httpx.get(f"{admin_url}/metrics", timeout=WAIT_S).text
    )


@pytest.mark.parametrize("kind", ["tcp", "valkey"])
def test_a_session_finds_its_owner_through_either_gateway(kind: str, tmp_path: Path) -> None:
    if kind == "valkey" and find_binary() is None:
        pytest.skip("no valkey-server and no redis-server on PATH (apt-get install redis-server)")
    with ExitStack() as stack:
        url, shared = stack.enter_context(directory(kind, tmp_path / "directory"))
        workers = [
            stack.enter_context(running(tmp_path / f"worker{n}", "worker", "--port", "0"))[0][0]
            for n in range(2)
        ]
        named = [word for worker in workers for word in ("--worker", worker)]
        gateways = [
            stack.enter_context(
                running(tmp_path / f"gateway{n}", "gateway", "--directory", url, *named)
            )[0]
            for n in range(2)
        ]
        one, two = (
            stack.enter_context(httpx.Client(base_url=lines[0], timeout=WAIT_S))
            for lines in gateways
        )
        messages = [{"role": "user", "content": "tell me of owners and epochs. " * 40}]
        first = turn(one, messages)
        until = time.monotonic() + BOUND_S
        while not is_bound(gateways[0][1]):
            assert time.monotonic() < until, "the directory was not told"
            time.sleep(0.1)
        second = turn(two, messages)
        assert second.headers["x-ownerserve-worker"] == first.headers["x-ownerserve-worker"]
        assert second.headers["x-ownerserve-reason"] == "owner"
        assert int(second.headers["x-ownerserve-cached-tokens"]) > 100
        # A directory that is lost costs no turn: both go by what they know.
        shared.kill()
        for gateway in (one, two):
            later = turn(gateway, messages)
            assert later.headers["x-ownerserve-worker"] == first.headers["x-ownerserve-worker"]
