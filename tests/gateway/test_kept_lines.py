"""A gateway asks a worker again and again over one connection, for as long as that stands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.http.fetching import KeptLine, fetch

ACCESS = open_access(None, None)


class Speaker:
    """A server that answers each question with the question; it notes on which connection, and
    which headers came along."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bytes]] = []
        self.heads: list[bytes] = []
        self.more = b""
        """More header lines of its answers."""
        self.lets_go_after = 1 << 30
        """So many answers, it closes a connection without a word."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._connections = 0
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            for _ in range(self.lets_go_after):
                head = await reader.readuntil(b"\r\n\r\n")
                target = head.split(b" ", 2)[1]
                self.heard.append((number, target))
                self.heads.append(head.lower())
                await self.may_answer.wait()
                told = b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n" % (self.more, len(target))
                writer.write(told + target)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


Scenario = Callable[[Speaker, Address], Coroutine[Any, Any, None]]


def play(scenario: Scenario) -> None:
    async def main() -> None:
        speaker = Speaker()
        server = await asyncio.start_server(speaker.serve, "127.0.0.1", 0)
        await scenario(speaker, Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        server.close()

    asyncio.run(main())


def test_questions_share_a_connection_and_others_have_their_own() -> None:
    async def scenario(speaker: Speaker, address: Address) -> None:
        line = KeptLine(address, ACCESS)
        for number in range(3):
            answer = await line.fetch(b"/%d" % number)
            assert (answer.is_good, answer.body) == (True, b"/%d" % number)
        assert [connection for connection, _ in speaker.heard] == [1, 1, 1]
        assert not any(b"connection:" in head for head in speaker.heads)
        assert (await fetch(address, b"/own", ACCESS)).body == b"/own"
        assert speaker.heard[-1] == (2, b"/own") and b"connection: close" in speaker.heads[-1]
        line.close()

    play(scenario)


@pytest.mark.parametrize("how", ["said", "unsaid"])
def test_one_that_the_worker_closed_is_opened_anew(how: str) -> None:
    async def scenario(speaker: Speaker, address: Address) -> None:
        line = KeptLine(address, ACCESS)
        if how == "said":
            speaker.more = b"connection: close\r\n"
        else:
            speaker.lets_go_after = 1
        for number in range(3):
            assert (await line.fetch(b"/%d" % number)).body == b"/%d" % number
        assert speaker.heard == [(1, b"/0"), (2, b"/1"), (3, b"/2")]
        line.close()

    play(scenario)


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next_one() -> None:
    async def scenario(speaker: Speaker, address: Address) -> None:
        line = KeptLine(address, ACCESS)
        assert (await line.fetch(b"/first")).is_good
        speaker.may_answer.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await line.fetch(b"/late")
        speaker.may_answer.set()
        assert (await line.fetch(b"/next")).body == b"/next"
        line.close()

    play(scenario)


def test_where_nobody_listens_any_more_there_is_an_error_and_then_an_answer() -> None:
    async def main() -> None:
        speaker = Speaker()
        speaker.lets_go_after = 1
        server = await asyncio.start_server(speaker.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        line = KeptLine(Address("127.0.0.1", port), ACCESS)
        assert (await line.fetch(b"/a")).is_good
        server.close()
        with pytest.raises(OSError):
            await line.fetch(b"/b")
        server = await asyncio.start_server(speaker.serve, "127.0.0.1", port)
        assert (await line.fetch(b"/c")).is_good
        line.close()
        server.close()

    asyncio.run(main())
