"""`ownerserve worker` in a process of its own, and a wire to its directory that can be held."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, encode_turn_line
from ownerserve.kv.wire.rpc import RpcAnswer, RpcRequest
from ownerserve.kv.wire.status import WorkerStatus
from ownerserve.node.rpc.server import RpcClient
from tests.support.children import importing
from tests.support.hf.fleet_rig import WAIT_S
from tests.support.metric_lines import summed
from tests.support.waits import until

START_S = 600.0
"""Longer than torch is imported and a tiny model made on a machine with eight times its work."""
Send = Callable[[socket.socket, bytes], None]


class WorkerProcess:
    """Started and ready when made; it keeps and loads by the prices of an unmeasured engine. `env`
    is the environment of its process; None: this one's, with our code."""

    def __init__(
        self,
        folder: Path,
        name: str,
        directory: str | None,
        *flags: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        ready = folder / f"{name}.ready"
        owning = () if directory is None else ("--directory", directory)
        self.process = subprocess.Popen([
            sys.executable, "-m", "tests.support.hf.assumed", "worker", "--model", "tiny-qwen3",
            "--kv-memory", "8MiB", "--port", "0", "--rpc-port", "0", "--worker-id", name,
            *owning, *flags, "--threads", "1", "--ready-file", str(ready),
        ], env=env or importing())  # fmt: skip
        try:
            self._meet(ready)
        except BaseException:
            self.process.kill()
            self.process.wait(WAIT_S)
            raise

    def _meet(self, ready: Path) -> None:
        until(
            lambda: ready.exists() or self.process.poll() is not None,
            within_s=START_S,
            what=f"{ready.stem} serves",
        )
        assert ready.exists(), f"{ready.stem} ended with {self.process.returncode}"
        self.url = ready.read_text().strip()
        self.name = self.url.removeprefix("http://")
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        status = msgspec.json.decode(self.http.get("/ownerserve/status").content, type=WorkerStatus)
        unit = status.unit
        self.unit = RoutingUnit(WorkerId(unit.worker), unit.rank, Incarnation(unit.incarnation))
        self.rpc = str(status.profile.rpc)

    def metric(self, start: str) -> float:
        return summed(self.http.get("/metrics").text, start)

    def serve(self, prompt: list[int], name: SessionId | None, **line: Any) -> dict[str, Any]:
        """A turn that a gateway sends here, whoever owns its session."""
        told = encode_turn_line(TurnLine(name=name, target=self.unit, **line)).decode()
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
        body |= {"return_token_ids": True}
        answer = self.http.post("/v1/completions", json=body, headers={TURN_HEADER: told})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "cached": int(answer.headers["x-ownerserve-cached-tokens"]),
            "mode": answer.headers["x-ownerserve-mode"],
        }

    def asked(self, request: RpcRequest) -> RpcAnswer:
        client = RpcClient(self.rpc)
        try:
            return client.ask(request)
        finally:
            client.close()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it, if it has not been killed."""
        self.http.close()
        if self.process.poll() is None:
            self.thaw()
            self.process.terminate()
            self.process.wait(WAIT_S)


class Answers:
    """Between a worker and the peer at `address`: before what the peer says first of the bytes
    `word` arrives, `told` is called."""

    def __init__(self, address: str, word: bytes, told: Callable[[], None]) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._peer, self._word, self._told = (host, int(port)), word, told
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_told = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._peer)
            except OSError:  # it has ended
                near.close()
                continue
            for source, sink, send in (
                (near, far, socket.socket.sendall),
                (far, near, self._answer),
            ):
                pumped = (source, sink, send)
                threading.Thread(target=Wire.pump, args=pumped, daemon=True).start()

    def _answer(self, sink: socket.socket, data: bytes) -> None:
        if self._word in data and not self.is_told.is_set():
            self._told()
            self.is_told.set()
        sink.sendall(data)


class Wire:
    """Between a worker and its directory, or another worker: what the worker sends is held, or goes
    on."""

    def __init__(self, directory: str) -> None:
        host, port = directory.removeprefix("tcp://").rsplit(":", 1)
        self._directory = (host, int(port))
        self._lock = threading.Lock()
        self._holds = False
        self._holds_at = b""
        self._held: list[tuple[socket.socket, bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """From now on nothing that the worker sends arrives."""
        with self._lock:
            self._holds = True

    def hold_at(self, word: bytes) -> None:
        """From the first message with this word on nothing that the worker sends arrives."""
        with self._lock:
            self._holds_at = word

    @property
    def held(self) -> bytes:
        """What is held."""
        with self._lock:
            return b"".join(data for _, data in self._held)

    def let_go(self) -> None:
        """All that was held arrives, and what comes after it."""
        with self._lock:
            self._holds, self._holds_at = False, b""
            held, self._held = self._held, []
            for sink, data in held:
                with suppress(OSError):
                    sink.sendall(data)

    def close(self) -> None:
        self.let_go()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._directory)
            except OSError:  # nobody listens there any more
                near.close()
                continue
            for source, sink, send in ((near, far, self._pass), (far, near, socket.socket.sendall)):
                threading.Thread(target=self.pump, args=(source, sink, send), daemon=True).start()

    def _pass(self, sink: socket.socket, data: bytes) -> None:
        with self._lock:
            if self._holds_at and self._holds_at in data:
                self._holds = True
            if self._holds:
                self._held.append((sink, data))
            else:
                sink.sendall(data)

    @staticmethod
    def pump(source: socket.socket, sink: socket.socket, send: Send) -> None:
        try:
            while data := source.recv(1 << 16):
                send(sink, data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
