"""Agents as clients of a gateway: each has a session that grows, and asks again when it is told to,
as the makers' own clients do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import NamedTuple

from tests.support.gateway.world import header

LAST = b"data: [DONE]\n\n"
TRIES_MAX = 200
"""A turn that fails so often is lost."""
RETRY_S, RETRY_MAX_S = 0.5, 8.0
"""OpenAI's client's: doubled with each try, less a quarter by chance, unless a Retry-After says."""


class Turned(NamedTuple):
    """A turn that was answered whole: when, after which tries, and the first byte's wait."""

    at_s: float
    tries: int
    first_byte_s: float
    worker: str


class Agent:
    """An agent has a name and a context; each turn sends all of it, and `growth` bytes more."""

    def __init__(self, name: str, port: int, *, context: bytes, growth: int) -> None:
        self.name = name
        self.context = context
        self.turns: list[Turned] = []
        self.met: Counter[str] = Counter()
        """What went wrong, by status or by name."""
        self._port = port
        self._growth = growth
        self._chance = random.Random(name)

    async def play(self, turns: int) -> None:
        """So many turns more, one after another."""
        for _ in range(turns):
            await self.turn()

    async def turn(self) -> None:
        """One turn, tried until it is answered."""
        self.context += self._chance.randbytes(self._growth // 2).hex().encode()
        for tried in range(TRIES_MAX):
            began_s = time.monotonic()
            try:
                worker, first_s = await self._ask()
            except Told as told:
                self.met[told.what] += 1
                backoff_s = min(RETRY_S * 2**tried, RETRY_MAX_S)
                backoff_s *= 1 - 0.25 * self._chance.random()
                await asyncio.sleep(told.retry_after_s or backoff_s)
                continue
            now_s = time.monotonic()
            self.turns.append(Turned(now_s, tried + 1, first_s - began_s, worker))
            return
        self.met["lost"] += 1

    async def _ask(self) -> tuple[str, float]:
        """The worker that answered, and when its first event came. Raises Told."""
        body = json.dumps({"prompt": self.context.decode(), "stream": True, "max_tokens": 4})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nx-session-id: {self.name}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + body.encode())
            said = await reader.readuntil(b"\r\n\r\n")
            status = int(said.split(b" ", 2)[1])
            if status != 200:
                raise Told(str(status), float(header(said, b"retry-after") or 0))
            await reader.readuntil(b"data: ")
            first_s = time.monotonic()
            rest = await reader.readuntil(b"\r\n0\r\n\r\n")
            if LAST not in rest:
                raise Told("short", 0.0)
            return (header(said, b"x-ownerserve-worker") or b"").decode(), first_s
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Told(type(error).__name__, 0.0) from error
        finally:
            if writer is not None:
                writer.close()


class Told(Exception):
    """A turn's try came to nothing."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s
