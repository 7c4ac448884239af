"""Processes that the zygote has forked: begun, signalled and waited for by whoever asked."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from tests.support.children import importing
from tests.support.kills.zygote import Order
from tests.support.waits import LOOK_S, until

SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_STARTED_S = 600.0
FAILED = "a check does not hold"
"""What a member says of its state machines where one of their checks fails."""


class Forked:
    """One process. Its connection to the zygote stays open for as long as it lives."""

    def __init__(self, given: Sequence[str], log: Path) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_zygote())
        self._line.sendall(msgspec.json.encode(Order([*given], str(log))))
        self._said = b""
        self._lock = threading.Lock()
        self._code: int | None = None
        self.pid = int(self._next() or 0)
        assert self.pid, "the zygote has forked nothing"

    def wait(self, within_s: float) -> int | None:
        """Its exit code, as `poll` has it, once it has ended; None where it still lives."""
        end_s = time.monotonic() + within_s
        while (code := self.poll()) is None and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return code

    def poll(self) -> int | None:
        """Its exit code, -9 for one that was killed; None while it lives. For any thread."""
        with self._lock:
            if self._line.fileno() < 0:
                return self._code
            if not select.select([self._line], [], [], 0.0)[0]:
                return None
            said = self._next()
            self._code = int(said) if said else -signal.SIGKILL
            while self._next():  # till nothing of it is left
                pass
            self._line.close()
            return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """To one that has ended: nothing."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _next(self) -> bytes:
        """The next line that it says; empty: it is gone."""
        while b"\n" not in self._said:
            data = self._line.recv(64)
            if not data:
                return b""
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line


@cache
def _zygote() -> str:
    """The socket of the one zygote of a test run, which ends with it."""
    path = f"{tempfile.mkdtemp(prefix='zygote-')}/s"
    command = [sys.executable, "-m", "tests.support.kills.zygote", path]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=importing(**SETTINGS))
    _CHILDREN.append(child)
    until(Path(path).exists, within_s=_STARTED_S, what="the zygote")
    return path


_CHILDREN: list[subprocess.Popen[bytes]] = []
