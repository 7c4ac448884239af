"""A process has a line to its supervisor: it says that it is ready, and hears when to end."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from ownerserve.gateway.processes.supervisor import DRAIN, END, RELOAD, Ready


class Line:
    """A line sets `drain`, `end` and `reload` as they are told; the supervisor's end is told as
    `drain`."""

    def __init__(self, line: socket.socket) -> None:
        self.drain = asyncio.Event()
        self.end = asyncio.Event()
        self.reload = asyncio.Event()
        self._line = line
        self._line.settimeout(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line.fileno(), self._read)

    def ready(self, ready: Ready) -> None:
        """Say that this process is ready."""
        self._line.send(msgspec.json.encode(ready) + b"\n")

    def _read(self) -> None:
        try:
            words = self._line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if RELOAD in words:
            self.reload.set()
        if not words or DRAIN in words or END in words:
            self.drain.set()
        if END in words:
            self.end.set()
        if not words:
            self._loop.remove_reader(self._line.fileno())
