"""TCP between two processes, seen: a trap acts when a message passes, and loses it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from tests.support.kills.cutting import Between

T = TypeVar("T")
WAIT_S = 60.0


class At(Enum):
    """Which message of a pair is lost."""

    REQUEST = "request"
    ANSWER = "answer"


class Lane(NamedTuple):
    """Whose wire it is: who asks over it, and who answers."""

    asker: str
    answerer: str


class Trap:
    """Springs once: at the first request on `lane` that has `tag`, or at what is answered behind
    it."""

    def __init__(self, tag: str, at: At, act: Callable[[], None], *, lane: Lane) -> None:
        self.at = at
        self.sprung = threading.Event()
        self._lane = lane
        self._tag = b"\xa4type" + bytes([0xA0 | len(tag)]) + tag.encode()
        self._act = act
        self._is_taken = False
        self._lock = threading.Lock()

    def takes(self, data: bytes, lane: Lane) -> bool:
        """Whether the message passes here, for the first time."""
        with self._lock:
            if self._is_taken or lane != self._lane or self._tag not in data:
                return False
            self._is_taken = True
            return True

    def spring(self) -> None:
        self._act()
        self.sprung.set()


class Wires:
    """All proxies of a fleet, on one loop in a thread. One trap at a time lies on all of them."""

    def __init__(self) -> None:
        self.trap: Trap | None = None
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._pipes: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def lay(
        self,
        port: int,
        lane: Lane,
        *,
        told: dict[bytes, bytes] | None = None,
        between: Callable[[], Between] = Between,
    ) -> int:
        """A port before 127.0.0.1:`port`, for `lane` alone. `told`: bytes of answers that are said
        otherwise, as long as they were; may grow while the proxy runs. `between`: made for each
        connection, sees all that passes."""

        async def made() -> int:
            server = await asyncio.start_server(
                lambda reader, writer: self._pipe(
                    reader, writer, port, lane=lane, told=told or {}, between=between()
                ),
                "127.0.0.1",
                0,
            )
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return self._run(made())

    def close(self) -> None:
        async def closed() -> None:
            for server in self._servers:
                server.close()
            pipes = [*self._pipes]
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)

        self._run(closed())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _pipe(
        self,
        here: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        port: int,
        *,
        lane: Lane,
        told: dict[bytes, bytes],
        between: Between,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        writers = [back]
        try:
            there, forth = await asyncio.open_connection("127.0.0.1", port)
            writers.append(forth)
            asked = asyncio.Event()
            await _first(
                self._requests(here, forth, asked, lane=lane, between=between),
                self._answers(there, back, told, asked=asked, between=between),
            )
        except OSError:
            pass  # whoever is behind is down: the caller's connection ends too
        finally:
            self._pipes.discard(task)
            for writer in writers:
                writer.close()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asked: asyncio.Event,
        *,
        lane: Lane,
        between: Between,
    ) -> None:
        """Until a side ends, or the trap takes one: that one and all behind it are lost."""
        while data := await reader.read(1 << 16):
            trap = self.trap
            if trap is not None and trap.takes(data, lane):
                if trap.at is At.REQUEST:
                    await asyncio.to_thread(trap.spring)
                    return
                asked.set()
            writer.write(between.down(data))
            await writer.drain()

    async def _answers(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        told: dict[bytes, bytes],
        *,
        asked: asyncio.Event,
        between: Between,
    ) -> None:
        """The same back: what is answered behind the trapped request is lost."""
        while data := await reader.read(1 << 16):
            if asked.is_set() and self.trap is not None:
                await asyncio.to_thread(self.trap.spring)
                return
            for said, instead in told.items():
                data = data.replace(said, instead)
            writer.write(between.up(data))
            await writer.drain()


async def _first(*copies: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(one) for one in copies]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
