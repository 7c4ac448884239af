"""This module serves a worker's application on a port until a signal. Owns the listening socket and
ready file."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ownerserve.engines.hf.http.leaving import WorkerLeave
from ownerserve.kv.listening import WORKER, Protection, open_listener

GRACE_S = 2
"""How long open answers may go on after a signal."""


def listen(host: str, port: int, *, protection: Protection = Protection.OPEN) -> socket.socket:
    """Return a bound socket; port 0 takes a free one. Raises InvalidInput when it can't be had, or
    may not be."""
    return open_listener(WORKER, host, port, protection=protection)


def url_of(bound: socket.socket) -> str:
    """Return the HTTP address of the bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def worker_id_of(bound: socket.socket) -> str:
    """Return where the worker serves, as a gateway names it: host:port. A worker that listens at
    every address is called by its machine's name."""
    host, port = bound.getsockname()[:2]
    return f"{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"


def write_ready_file(path: Path, url: str) -> None:
    """Write `url` and a newline, all or nothing: a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(url + "\n")
    partial.replace(path)


class _Server(uvicorn.Server):
    """A `_Server` is uvicorn, telling when it serves, and leaving as it is told to."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], leaving: WorkerLeave | None
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._leaving = leaving
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, at once or once the worker has left; a second signal ends at once."""
        if sig != signal.SIGTERM or self._leaving is None or self._ending is not None:
            super().handle_exit(sig, frame)
            return
        self._ending = self._loop.create_task(self._leave(self._leaving, sig, frame))

    async def _leave(self, leaving: WorkerLeave, sig: int, frame: FrameType | None) -> None:
        await leaving.end()
        super().handle_exit(sig, frame)


def serve(
    app: Starlette,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None],
    leaving: WorkerLeave | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, after which the worker leaves as `leaving` says; returns once
    everything is closed."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    # uvicorn raises a signal again when it has shut down; the process goes on to its own end then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        _Server(config, on_ready, leaving).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()
