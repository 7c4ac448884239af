"""A gateway with its directory in itself, over real workers that own; and its restart."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ownerserve.cli.directory.embedded import embedded_at
from ownerserve.kv.errors import InvalidInput
from tests.support.gateway.commands import counted, running
from tests.support.net import free_port, listening
from tests.support.waits import WAIT_S, until

SESSIONS, WORKERS = 80, 3


@pytest.mark.engine
def test_after_its_restart_sessions_are_where_they_were(tmp_path: Path) -> None:
    """It reads what its workers hold before its port is open, whatever its directory has
    forgotten."""
    ports, directory = [free_port() for _ in range(WORKERS)], free_port()
    options = ["--port", "0", "--admin-port", "0", "--receipts", "open"]
    options += ["--directory", f"embedded:{directory}"]
    options += [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        (url, admin, served), process = first.enter_context(
            running(tmp_path / "first", "gateway", *options)
        )
        assert served == f"tcp://127.0.0.1:{directory}"
        assert {one.host for one in listening(process.pid)} == {"127.0.0.1"}
        for number, port in enumerate(ports):
            worker = ["worker", "--model", "tiny-qwen3", "--port", str(port)]
            worker += ["--worker-id", f"w{number}", "--directory", served]
            stack.enter_context(running(tmp_path / f"worker{number}", *worker))
        until(lambda: httpx.get(f"{admin}/health").json()["workers_up"] == WORKERS)
        before = turns(url, 1)
        assert min(Counter(before.values()).values()) > SESSIONS // WORKERS // 2
        held = "ownerserve_gateway_worker_extents"
        until(lambda: counted(admin, held) >= SESSIONS, what="all are held")
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        first.close()
        (url, admin, _), _ = stack.enter_context(running(tmp_path / "again", "gateway", *options))
        after = turns(url, 2)
        # Not all must: on a busy machine a queue may cost more than so short a prompt. Where
        # nothing is known two of three are elsewhere.
        assert len([n for n in before if after[n] != before[n]]) <= SESSIONS // 4


def turns(url: str, count: int) -> dict[int, str]:
    """A turn of each session: where it ran."""

    def turn(session: int) -> tuple[int, str]:
        # A later turn adds little, as an agent's does. What a worker said of its load amid a turn
        # stands until it is heard again, a second later: a turn as long as what is held costs as
        # much as that saves, and a worker's sessions would be elsewhere for that second.
        said = f"session {session} says: " + "rivers and seas, " * 24 + "and so on, " * (count - 1)
        body = {"prompt": said, "max_tokens": 1, "temperature": 0}
        headers = {"x-session-id": f"s{session}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return session, answer.headers["x-ownerserve-worker"]

    # Later turns one by one: beside others' prompts so short a one is computed where it need not
    # wait, whatever is held.
    with ThreadPoolExecutor(8 if count == 1 else 1) as pool:
        return dict(pool.map(turn, range(SESSIONS)))


@pytest.mark.parametrize(
    "url", ["embedded:", "embedded:x", "embedded:70000", "embedded:-1", "embedded:a:"]
)
def test_a_bad_port_is_one_error(url: str) -> None:
    with pytest.raises(InvalidInput, match="--directory: there is no port"):
        embedded_at(url)


def test_other_addresses_are_not_embedded() -> None:
    assert embedded_at("embedded") == ("127.0.0.1", 7700)
    assert embedded_at("embedded:0") == ("127.0.0.1", 0)
    assert embedded_at("embedded:[::1]:7701") == ("::1", 7701)
    assert embedded_at("tcp://127.0.0.1:7700") is embedded_at("embeddedx") is None
