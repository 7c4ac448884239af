"""The demo's hot spot over a gateway and workers that are played: what goes wrong is told, and
nothing is waited for that does not come. Real ones: tests/cli/test_demo.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from ownerserve.cli.demo import hot_spot as scene
from ownerserve.cli.demo.hot_spot import HotSpot, hot_spot

AT_ONCE = 5
"""Tokens of one event: characters of several tokens come when they are whole."""


class Answering(BaseHTTPRequestHandler):
    """Answers turns as the one worker at this address, and is asked for metrics."""

    status = 200

    def do_GET(self) -> None:
        self._head(200)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._head(self.status)
        for first in range(0, asked["max_tokens"], AT_ONCE):
            tokens = range(first, min(first + AT_ONCE, asked["max_tokens"]))
            said = [{"token": f"{n}", "logprob": -1.0, "top_logprobs": []} for n in tokens]
            choice = {"delta": {"content": "x"}, "logprobs": {"content": said}}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def _head(self, status: int) -> None:
        host, port = self.server.server_address[:2]
        self.send_response(status)
        if status == 200:
            self.send_header("x-ownerserve-worker", f"{host!s}:{port}")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


class Leaving:
    """A worker's process, which ends when it is told to, if at all."""

    def __init__(self, code: int | None) -> None:
        self.told = list[int]()
        self._code = code

    def poll(self) -> int | None:
        return self._code if self.told else None

    def send_signal(self, sig: int) -> None:
        self.told.append(sig)


class PlayedFleet:
    """A fleet of one address, in place of `DemoFleet`."""

    process = Leaving(0)
    url = ""

    def __init__(self, folder: Path, begin: object) -> None:
        self.gateway_url = self.admin_url = self.url
        self.workers = {self.url.removeprefix("http://"): SimpleNamespace(process=self.process)}

    def start(self, *told: object) -> None: ...

    def __enter__(self) -> PlayedFleet:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlayedFleet]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    serving = Thread(target=server.serve_forever, daemon=True)
    serving.start()
    monkeypatch.setattr(PlayedFleet, "url", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(PlayedFleet, "process", Leaving(0))
    monkeypatch.setattr(scene, "DemoFleet", PlayedFleet)
    monkeypatch.setattr(scene, "LEAVE_S", 0.1)
    yield PlayedFleet
    server.shutdown()
    server.server_close()
    serving.join()


def play() -> HotSpot:
    return hot_spot("ownerserve", model="any", workers=2)


def test_a_worker_is_told_to_leave_though_tokens_come_several_at_once(
    played: type[PlayedFleet],
) -> None:
    spot = play()
    assert played.process.told == [signal.SIGTERM]
    assert (spot.tokens_before, spot.exit_code, spot.errors) == (15, 0, [])


def test_turns_that_fail_end_the_scene_and_are_told(
    played: type[PlayedFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "status", 503)
    spot = play()
    assert spot.errors and all("HTTP 503" in error for error in spot.errors)
    assert not played.process.told and not spot.compared.equal


def test_a_worker_that_does_not_leave_is_told_of(
    played: type[PlayedFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlayedFleet, "process", Leaving(None))
    spot = play()
    [error] = spot.errors
    assert "has not ended" in error
