"""A directory process that is stopped (SIGSTOP) before a gateway: its port still takes what it is
sent, and nothing is answered. 200 new sessions come; those that asked with its first frame wait."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from ownerserve.gateway.asking import LOOK_UP_S
from tests.gateway.test_roster import asked
from tests.support.children import importing
from tests.support.gateway.process import GatewayProcess, gateway_process, worker_process
from tests.support.waits import until

pytestmark = pytest.mark.slow

SESSIONS = 200
AT_ONCE = 8


@contextmanager
def directory_process(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`ownerserve directory serve` until the end, and its address."""
    ready = folder / "directory"
    words = ["directory", "serve", "--port", "0", "--new-fleet", "--ready-file", str(ready)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ownerserve.cli.main", *words],
        env=importing(),
        stdout=subprocess.DEVNULL,
    )
    try:
        until(ready.exists)
        yield ready.read_text().split()[0], process
    finally:
        process.kill()
        process.wait()


def come(gateway: GatewayProcess, kind: str) -> list[float]:
    """So many new sessions come, a few at once; how long each waited, in seconds."""

    def turn(number: int) -> float:
        began_s = time.monotonic()
        headers = {"x-session-id": f"{kind}{number}"}
        answer = client.post("/v1/chat/completions", json={"a": 1}, headers=headers)
        assert answer.status_code == 200
        return time.monotonic() - began_s

    with (
        httpx.Client(base_url=gateway.data_url, timeout=60) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        return list(pool.map(turn, range(SESSIONS)))


def told(gateway: GatewayProcess) -> tuple[str, dict[str, int]]:
    """What the directory is to the gateway, and what it answered so far."""
    status = asked(gateway.admin_url, "GET", "/status")[1]["directory"]
    return status["state"], status["answers"]


def test_a_stopped_directory_costs_those_who_asked_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        address, process = stack.enter_context(directory_process(tmp_path))
        ports = [stack.enter_context(worker_process()).port for _ in range(2)]
        gateway = stack.enter_context(gateway_process(tmp_path, ports, "--directory", address))
        before_s = come(gateway, "before")
        assert told(gateway) == ("well", {"miss": SESSIONS})

        os.kill(process.pid, signal.SIGSTOP)
        stopped_s = come(gateway, "stopped")
        state, answers = told(gateway)
        assert answers["too_slow"] <= AT_ONCE, "only those with its first frame"
        not_waiting = answers["not_asked"] + answers.get("not_awaited", 0)
        assert answers["too_slow"] + not_waiting == SESSIONS
        assert statistics.median(stopped_s) < LOOK_UP_S
        until(lambda: told(gateway)[0] in ("slow", "lost"))
        until(lambda: told(gateway)[1].get("unreachable", 0))  # the client's own deadline is over
        came = come(gateway, "later")
        assert told(gateway)[1]["too_slow"] == answers["too_slow"], "nobody waits any more"
        print(
            f"added by the stopped directory, ms, of {SESSIONS} turns {AT_ONCE} at once:"
            f" median {1e3 * (statistics.median(stopped_s) - statistics.median(before_s)):.1f},"
            f" mean {1e3 * (statistics.mean(stopped_s) - statistics.mean(before_s)):.1f},"
            f" most {1e3 * (max(stopped_s) - max(before_s)):.0f};"
            f" later: median {1e3 * (statistics.median(came) - statistics.median(before_s)):.1f}"
        )
        assert "directory_" in gateway.said.read_text()

        os.kill(process.pid, signal.SIGCONT)

        def is_well() -> bool:
            httpx.post(
                gateway.data_url + "/v1/chat/completions",
                json={"a": 1},
                headers={"x-session-id": f"back{time.monotonic()}"},
                timeout=60,
            )
            return told(gateway)[0] == "well"

        until(is_well)
        assert "directory_back" in gateway.said.read_text()
        assert state in ("well", "slow", "lost")
