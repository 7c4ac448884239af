"""A worker as a process of its own, to be stopped and killed: `python -m
tests.support.gateway.process` prints its port, and streams events to whoever asks, for ever. And
the gateway as one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tests.support.children import importing
from tests.support.gateway.world import header
from tests.support.waits import until

EVERY_S = 0.2
SHORT = 15
"""How many events /...short-stream has before its end."""
SLOW_S = 0.5
"""How long /...slow takes to answer."""


COUNTED = b'"counted"'
"""A body with this in it is answered with its `usage`: a byte is a token, and what the session's
last turn here had is cached."""
_had: dict[bytes, int] = {}


def _counted(session: bytes, tokens: int) -> bytes:
    cached, _had[session] = min(_had.get(session, 0), tokens - 1), tokens
    details = b'"prompt_tokens_details": {"cached_tokens": %d}' % cached
    return b'{"usage": {"prompt_tokens": %d, "completion_tokens": 1, %b}}' % (tokens, details)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(header(head, b"content-length") or 0))
            path = head.split(b" ", 2)[1]
            if path.endswith(b"slow"):
                await asyncio.sleep(SLOW_S)
            if COUNTED in body:
                said = _counted(header(head, b"x-session-id") or b"", len(body))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
                continue
            if not path.endswith(b"stream"):
                status = b"404 No" if path.startswith(b"/ownerserve/") else b"200 OK"
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)
                continue
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            event = b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n'
            for _ in range(SHORT) if path.endswith(b"short-stream") else count():
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await asyncio.sleep(EVERY_S)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _main() -> None:
    place = sys.argv[1] if sys.argv[1:] else "127.0.0.1:0"
    if place.startswith("/"):
        server: asyncio.Server = await asyncio.start_unix_server(_serve, place)
        print(0, flush=True)
    else:
        host, port = place.split(":")
        server = await asyncio.start_server(_serve, host, int(port), backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class WorkerProcess:
    """A running worker process, and where it listens."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._process = process

    def stop(self) -> None:
        """SIGSTOP: the kernel goes on to accept, and nobody answers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


@contextmanager
def worker_process(
    path: Path | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[WorkerProcess]:
    """A worker that listens, at a Unix socket where `path` is given, until the end."""
    command = [sys.executable, "-m", "tests.support.gateway.process"]
    command.append(f"{host}:{port}" if path is None else str(path))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=importing(), stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield WorkerProcess(process, int(process.stdout.readline()))
        finally:
            process.kill()


class GatewayProcess(NamedTuple):
    """A running gateway, where it serves, and the file with all that it says."""

    process: subprocess.Popen[str]
    data_url: str
    admin_url: str
    said: Path


@contextmanager
def gateway_process(
    folder: Path, workers: Sequence[int], *more: str, descriptors: int | None = None
) -> Iterator[GatewayProcess]:
    """`ownerserve gateway` over workers at these ports, until the end; it may have so many
    `descriptors`."""
    ready, said = folder / "ready", folder / "said"
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", "--ready-file", str(ready)]
    command += ["--port", "0", "--admin-port", "0", *more]
    for port in workers:
        command += ["--worker", f"http://127.0.0.1:{port}"]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    with said.open("w") as out:
        process = subprocess.Popen(
            command, env=importing(), stdout=out, stderr=subprocess.STDOUT, text=True
        )
    try:
        until(lambda: ready.exists() or process.poll() is not None, within_s=60.0)
        assert ready.exists(), said.read_text()
        yield GatewayProcess(process, *ready.read_text().split(), said)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(_main())
