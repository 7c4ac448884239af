"""The end of a gateway process (SIGTERM): /health says so first, then nobody is let in, and turns
that run have time to end."""

from __future__ import annotations

import http.client
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.test_roster import PATH, began
from tests.support.gateway.process import GatewayProcess, gateway_process, worker_process
from tests.support.waits import until

pytestmark = pytest.mark.slow


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def started(stack: ExitStack, folder: Path, *words: str) -> GatewayProcess:
    ports = [stack.enter_context(worker_process()).port for _ in range(2)]
    return stack.enter_context(gateway_process(folder, ports, *words))


def is_open(gateway: GatewayProcess) -> bool:
    place = urlsplit(gateway.data_url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()
    return True


def test_health_says_it_first_then_nobody_is_let_in_and_turns_end_whole(
    stack: ExitStack, tmp_path: Path
) -> None:
    gateway = started(stack, tmp_path, "--drain-notice", "1.5", "--drain-timeout", "60")
    assert httpx.get(gateway.data_url + "/health").status_code == 200
    with began(gateway.data_url, f"{PATH}?short-stream") as (answer, _):
        gateway.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in gateway.said.read_text())
        health = httpx.get(gateway.data_url + "/health")
        assert (health.status_code, health.json()["draining"]) == (503, True)
        told = httpx.post(gateway.data_url + PATH, json={})
        assert (told.status_code, told.headers["connection"]) == (200, "close"), "it serves on"
        until(lambda: not is_open(gateway))
        assert gateway.process.poll() is None, "a turn runs"
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert gateway.process.wait(60) == 0
    assert "drained live=0" in gateway.said.read_text()


def test_a_turn_that_does_not_end_in_time_is_told_so(stack: ExitStack, tmp_path: Path) -> None:
    gateway = started(stack, tmp_path, "--drain-timeout", "0.5")
    with began(gateway.data_url, f"{PATH}?stream") as (answer, _):
        gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(http.client.IncompleteRead) as cut:
            answer.read()
        assert b"gateway_stopped" in cut.value.partial
    assert gateway.process.wait(60) == 0


def test_clients_that_turn_away_at_its_word_lose_nothing(stack: ExitStack, tmp_path: Path) -> None:
    """Eight clients ask /health before each turn, as a load balancer does: none meets a port that
    is closed, or a no."""
    gateway = started(stack, tmp_path, "--drain-notice", "2")
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def client() -> None:
        while True:
            if httpx.get(gateway.data_url + "/health", timeout=60).status_code != 200:
                return
            status = httpx.post(gateway.data_url + PATH, json={}, timeout=60).status_code
            with lock:
                statuses[status] += 1

    clients = [threading.Thread(target=client) for _ in range(8)]
    for one in clients:
        one.start()
    until(lambda: statuses[200] > 40)
    gateway.process.send_signal(signal.SIGTERM)
    for one in clients:
        one.join(60)
    assert set(statuses) == {200}
    assert gateway.process.wait(60) == 0
