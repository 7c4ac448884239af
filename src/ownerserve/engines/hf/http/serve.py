"""This module serves a worker's application on a port until a signal. Owns the listening socket and
ready file."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

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
    """A `_Server` is uvicorn, telling when it serves."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def serve(app: Starlette, bound: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; returns once everything is closed."""
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
        _Server(config, on_ready).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()
