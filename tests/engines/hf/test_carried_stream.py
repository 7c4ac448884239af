"""A seeded stream of a real model goes on at another worker when its own is killed: the client
reads what one worker alone would have said."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.process import gateway_process
from tests.support.hf.worker_process import WorkerProcess

pytestmark = pytest.mark.engine

TOKENS = 120
HELD_AFTER_BYTES = 8000
"""A third of the stream, or so: amid an event."""


class HeldStreams:
    """A way to a worker on which a stream stops after so many bytes, for good; until the worker is
    killed, for how fast it is must not matter."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.holds = True
        self.stopped = threading.Event()
        self.gone = threading.Event()
        self._worker = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._worker)
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        streamed = 0
        with suppress(OSError):
            while data := source.recv(1000):
                streamed += len(data) if streamed or b"text/event-stream" in data else 0
                if self.holds and streamed > HELD_AFTER_BYTES:
                    self.stopped.set()
                    self.gone.wait()
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_seeded_answer_is_whole_though_its_worker_is_killed(tmp_path: Path) -> None:
    workers = [WorkerProcess(tmp_path, f"w{number}", None) for number in range(2)]
    ways = [HeldStreams(one.url) for one in workers]
    body = {
        "messages": [{"role": "user", "content": "Say something long."}],
        "max_tokens": TOKENS, "temperature": 1.0, "seed": 11, "ignore_eos": True,
    }  # fmt: skip
    try:
        whole = [one.http.post("/v1/chat/completions", json=body).json() for one in workers]
        [alone, other] = [answer["choices"][0]["message"]["content"] for answer in whole]
        assert alone == other, "seeded"
        ports = [way.port for way in ways]
        with gateway_process(tmp_path, ports, "--carry-on", "--receipts", "open") as gateway:
            path = f"{gateway.data_url}/v1/chat/completions"
            with httpx.stream("POST", path, json={**body, "stream": True}, timeout=60) as answer:
                name = answer.headers["x-ownerserve-worker"]
                runs = ports.index(int(name.rpartition(":")[2]))
                assert ways[runs].stopped.wait(60)
                ways[1 - runs].holds = False
                workers[runs].process.kill()
                ways[runs].gone.set()
                read = list(answer.iter_lines())
            events = [json.loads(line[6:]) for line in read if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            assert "".join(choice["delta"].get("content", "") for choice in choices) == alone
            assert len({event["id"] for event in events}) == 1
            assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
            assert "data: [DONE]" in read
            legs = httpx.get(f"{gateway.admin_url}/metrics", timeout=30).text
            assert 'ownerserve_gateway_legs_total{leg="carry_on",outcome="done"} 1.0' in legs
    finally:
        for one in workers:
            one.http.close()
            one.process.kill()
            one.process.wait()
