"""A worker as a process of its own that says what it was sent: `python -m
tests.support.gateway.echoing` prints its port. Its answers have the length and the digest of the
body, and say how many slow turns ran as this one began. A held one is answered after `let_go`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import httpx

from tests.support.children import importing
from tests.support.gateway.world import header
from tests.support.waits import WAIT_S

SLOW_S = 0.5
GO = b"/go"
_IDS = count(1)
_running: set[asyncio.StreamWriter] = set()
"""Who waits for a slow answer."""
_held = [asyncio.Event()]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(header(head, b"content-length") or 0))
            path, at_once = head.split(b" ", 2)[1], 1
            if path == GO:
                _held.pop().set()
                _held.append(asyncio.Event())
            if path.startswith((b"/ownerserve/", GO)):
                writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\n{}")
                continue
            if b'"slow"' in body:
                _running.add(writer)
                at_once = len(_running)
                await asyncio.sleep(SLOW_S)
                _running.discard(writer)
            if b'"held"' in body:
                await _held[0].wait()
            said = {
                "id": f"resp_{next(_IDS)}",
                "at_once": at_once,
                "bytes": len(body),
                "digest": digest(body),
                "usage": {"prompt_tokens": len(body) // 4, "completion_tokens": 1},
            }
            text = json.dumps(said).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(text), text)
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def digest(body: bytes) -> str:
    """What an answer to this body says."""
    return hashlib.sha256(body).hexdigest()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def let_go(port: int) -> None:
    """Have the worker there answer what it holds by now."""
    httpx.get(f"http://127.0.0.1:{port}{GO.decode()}", timeout=WAIT_S, trust_env=False)


@contextmanager
def echoing_worker() -> Iterator[int]:
    """A worker that listens, until the end; its port."""
    command = [sys.executable, "-m", "tests.support.gateway.echoing"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=importing(), stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(_main())
