"""A fleet on an address that others reach: directory, worker, gateways as processes, with keys."""

from __future__ import annotations

import json
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

from tests.support.net import own_address

pytest.importorskip("torch")
pytest.importorskip("transformers")


pytestmark = pytest.mark.engine

WAIT_S = 300.0
COMMAND = [sys.executable, "-m", "ownerserve.cli.main"]


def ownerserve(*arguments: str) -> str:
    told = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


@contextmanager
def running(home: Path, *arguments: str) -> Iterator[list[str]]:
    """A command until the `with` ends; the lines of its ready file."""
    home.mkdir()
    ready = home / "ready"
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--ready-file", str(ready)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, f"{arguments[0]} has ended"
            assert time.monotonic() < deadline_s, "waited too long"
            time.sleep(0.02)
        yield ready.read_text().split()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def outcomes(admin: str) -> dict[str, float]:
    """What came of asking workers for places."""
    start = 'ownerserve_gateway_places_total{outcome="'
    lines = httpx.get(f"{admin}/metrics").text.splitlines()
    said = [line.removeprefix(start).split('"} ') for line in lines if line.startswith(start)]
    return {name: float(count) for name, count in said}


def completed(gateway: str, session: str) -> None:
    body = {"prompt": list(range(5, 205)), "max_tokens": 2, "temperature": 0}
    headers = {"x-session-id": session}
    told = httpx.post(f"{gateway}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    assert told.status_code == 200, told.text


def test_a_fleet_with_keys_asks_and_owns_beyond_loopback(tmp_path: Path) -> None:
    host, key = own_address(), str(tmp_path / "fleet.key")
    ownerserve("directory", "keys", "--out", key)
    keyed = ["--curve-key-file", key]
    with ExitStack() as stack:
        (directory,) = stack.enter_context(
            running(
                *(tmp_path / "directory", "directory", "serve", "--port", "0", "--new-fleet"),
                *("--host", host, *keyed),
            )
        )
        (worker,) = stack.enter_context(
            running(
                *(tmp_path / "worker", "worker", "--model", "tiny-qwen3", "--kv-memory", "8MiB"),
                *("--host", host, "--allow-remote", "--port", "0", "--rpc-host", "0.0.0.0"),
                *("--directory", directory, *keyed),
            )
        )
        rpc = httpx.get(f"{worker}/ownerserve/status").json()["profile"]["rpc"]
        assert rpc.startswith("curve://0.0.0.0:")
        gateway = ["gateway", "--worker", worker, "--port", "0", "--admin-port", "0"]
        data, admin = stack.enter_context(
            running(tmp_path / "gateway", *gateway, "--directory", directory, *keyed)
        )
        completed(data, "with keys")
        assert outcomes(admin) == {"reserved": 1.0}
        owned = f"{worker}/metrics"
        deadline_s = time.monotonic() + WAIT_S
        while "ownerserve_sessions_owned 1.0" not in httpx.get(owned).text:
            assert time.monotonic() < deadline_s, "the worker never owned its session"
            time.sleep(0.05)
        status = json.loads(ownerserve("directory", "status", directory, *keyed, "--json", "-"))
        assert status["records"]["sessions"] == 1
        data, admin = stack.enter_context(running(tmp_path / "without", *gateway))
        completed(data, "without keys")
        assert outcomes(admin) == {}, "it is served, and nobody is asked"
