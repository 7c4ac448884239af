"""The gateway's reader of a worker's inventory, over a socket that answers well, ill and not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.workers.inventory import InventoryReader
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Gone, Reported, WorkerUp
from ownerserve.router.residents import News
from tests.support.waits import WAIT_S, until_async

LIFE = Incarnation(7)


def page(said: Page) -> tuple[int, bytes]:
    return 200, msgspec.json.encode(said)


ONE = page(Page(7, 0, 0, 1, (Has(1, "s", "disk", 64),)))
NO_MORE = page(Page(7, 0, 0, 1))


class Rig:
    """One worker that says `says`, in turn, then the last of it for ever."""

    def __init__(self) -> None:
        self.says: list[tuple[int, bytes] | None] = []
        self.held_s = 0.0
        """So long it holds each question."""
        self.asked: list[bytes] = []
        self.news: list[News] = []
        self.fleet = Fleet()
        self.reader: InventoryReader

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.split(b" ", 2)[1])
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        try:
            await asyncio.sleep(self.held_s)
            if said is not None:
                status, body = said
                head = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
                writer.write(head + body)
                await writer.drain()
        finally:  # a question that is held as the test ends, too
            writer.close()

    def up(self, life: int) -> None:
        self.fleet.raise_up(WorkerUp(self.address.worker, 0, Incarnation(life)))

    def play(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            config = Config(workers=(self.address,), health_timeout_s=0.5)
            self.reader = InventoryReader(
                self.address,
                config,
                access=open_access(None, None),
                fleet=self.fleet,
                tell=self.news.append,
            )
            self.up(LIFE)
            await scenario()
            self.reader.close()
            server.close()

        asyncio.run(main())


def test_it_goes_on_where_it_ended_and_reads_a_new_life_from_the_start() -> None:
    rig = Rig()

    async def scenario() -> None:
        rig.says = [ONE, NO_MORE]
        await rig.reader.read()
        await rig.reader.read()
        assert rig.asked == [b"/ownerserve/inventory?after=0", b"/ownerserve/inventory?after=1"]
        assert len(rig.news) == 1
        await rig.reader.read()  # the former life's page, when the new one is known
        rig.up(8)
        await rig.reader.read()
        assert len(rig.news) == 1
        rig.says = [(200, msgspec.json.encode(Page(8, 0, 0, 3, (Has(3, "t", "disk", 32),))))]
        await rig.reader.read()
        assert [one.session for one in rig.news] == ["s", "t", "s"], "what was said before is gone"

    rig.play(scenario)


def test_words_are_told_of_their_rank_and_prefix_until_they_are_said_to_be_gone() -> None:
    rig = Rig()
    digest = bytes(range(32))
    has = Has(1, "s", "disk", 64, digest.hex())

    async def scenario() -> None:
        unit = RoutingUnit(rig.address.worker, 3, LIFE)
        rig.says = [
            page(Page(7, 3, 0, 2, (has,))),
            page(Page(7, 3, 0, 2, (Lost(2, "s", "disk"),))),
            page(Page(7, 3, 5, 6, (Has(6, "t", "disk", 32),))),
            page(Page(7, 3, 5, 6, (Has(6, "u", "disk", 16),))),
        ]
        await rig.reader.read()
        assert len(rig.asked) == 2, "the first page was not the last"
        assert rig.news == [
            Reported(unit, Tier.DISK, PrefixHash(digest), 64, SessionId("s")),
            Gone(unit, Tier.DISK, None, SessionId("s")),
        ]
        await rig.reader.read()
        asked = [int(one.rpartition(b"=")[2]) for one in rig.asked]
        assert asked == [0, 1, 2, 0], "words up to 5 were missed: from the start"
        assert [one.session for one in rig.news[2:]] == ["u"]

    rig.play(scenario)


def test_an_engine_that_does_not_understand_is_asked_once_a_life() -> None:
    for answer in ((404, b"{}"), (200, b"<html>"), (200, b'{"incarnation": "x"}')):
        rig = Rig()

        async def scenario(rig: Rig = rig, answer: tuple[int, bytes] = answer) -> None:
            rig.says = [ONE, answer]
            for _ in range(4):
                await rig.reader.read()
            assert len(rig.asked) == 2
            assert len(rig.news) == 2, "what it had said counts no longer"
            rig.up(8)
            await rig.reader.read()
            assert len(rig.asked) == 3

        rig.play(scenario)


def test_one_that_fails_now_is_asked_again_and_nothing_is_forgotten() -> None:
    rig = Rig()

    async def scenario() -> None:
        rig.says = [ONE, (503, b"{}"), (401, b""), None, NO_MORE]
        for _ in range(5):
            await rig.reader.read()
        assert len(rig.asked) == 5
        assert len(rig.news) == 1
        assert rig.reader.counts["failed"] == 3

    rig.play(scenario)


def test_news_that_could_not_be_taken_in_ends_a_reading_and_not_the_reader() -> None:
    rig = Rig()

    async def scenario() -> None:
        rig.says = [ONE, (200, msgspec.json.encode(Page(7, 0, 0, 2, (Has(2, "t", "disk", 32),))))]
        taken: list[News] = []

        def tell(news: News) -> None:
            taken.append(news)
            if len(taken) == 1:
                raise KeyError("a fault of ours")

        reader = InventoryReader(
            rig.address, Config(workers=(rig.address,)), access=open_access(None, None),
            fleet=rig.fleet, tell=tell,
        )  # fmt: skip
        reading = asyncio.create_task(reader.run())
        for count in (1, 2):
            reader.call()
            async with asyncio.timeout(WAIT_S):
                while len(taken) < count:
                    await asyncio.sleep(0.001)
        reading.cancel()
        assert reader.counts["failed"] == 1

    rig.play(scenario)


def test_a_called_reader_follows_what_its_worker_says() -> None:
    """It asks again after each answer that had words, and after one that was waited for; it stops
    where a worker does not hold questions, until it is called again."""
    rig = Rig()

    async def scenario() -> None:
        rig.says = [page(Page(7, 0, 0, n, (Has(n, "s", "disk", 16 * n),))) for n in (1, 2, 3)]
        rig.says.append(page(Page(7, 0, 0, 3)))
        reading = asyncio.create_task(rig.reader.run())
        rig.reader.call()
        await until_async(lambda: len(rig.asked) == 4)
        assert rig.asked[2:] == [b"/ownerserve/inventory?after=%d&wait_ms=1000" % n for n in (2, 3)]
        assert [one.tokens for one in rig.news if isinstance(one, Reported)] == [16, 32, 48]
        rig.says = [page(Page(7, 0, 0, 4, (Lost(4, "s", "disk"),))), page(Page(7, 0, 0, 4))]
        rig.reader.call()
        await until_async(lambda: len(rig.asked) == 6)
        assert isinstance(rig.news[-1], Gone)
        rig.held_s, rig.says = 0.6, [page(Page(7, 0, 0, 4))]
        rig.reader.call()
        await until_async(lambda: len(rig.asked) == 8)
        reading.cancel()

    rig.play(scenario)


def test_a_gateway_that_wants_no_news_asks_for_none() -> None:
    rig = Rig()

    async def scenario() -> None:
        rig.says = [ONE]
        config = Config(workers=(rig.address,), news_ms=None)
        reader = InventoryReader(
            rig.address, config, access=open_access(None, None), fleet=rig.fleet,
            tell=rig.news.append,
        )  # fmt: skip
        assert not await reader.read()
        assert not rig.asked and not rig.news

    rig.play(scenario)
