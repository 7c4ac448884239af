"""Real Valkey or Redis servers as child processes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

from tests.support.net import free_port


def find_binary() -> str | None:
    """valkey-server, else redis-server."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


class Server:
    """One server without persistence. `prefix`: a command that runs it elsewhere (a namespace)."""

    def __init__(
        self,
        home: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        prefix: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> None:
        binary = find_binary()
        assert binary is not None
        self.host, self.port = host, port or free_port()
        command = [
            *prefix, binary, "--port", str(self.port), "--bind", host, "--dir", str(home),
            "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0",
            "--protected-mode", "no", "--repl-ping-replica-period", "1", "--repl-timeout", "3",
            *options,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait()

    @property
    def url(self) -> str:
        return f"valkey://{self.host}:{self.port}"

    def client(self, timeout_s: float = 2.0) -> Any:
        return redis.Redis(host=self.host, port=self.port, socket_timeout=timeout_s)

    def _wait(self) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.exceptions.RedisError), self.client(0.5) as client:
                client.ping()
                return
            time.sleep(0.01)
        raise RuntimeError("the server did not start")

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it whatever it does."""
        if self._process.poll() is None:
            self.thaw()
            self._process.kill()
            self._process.wait()
