"""A reader reads what its worker says that it holds, and tells the state: one reader for each
worker.

A reader asks after each good probe of its worker, so also at once in a new life of it, and then
follows: the worker holds the question until something is new (NEWS_WAIT_MS at most), and the next
one is asked `news_ms` after an answer that had news, so that so long words are gathered. A worker
that does not hold questions is asked once a probe; one that does not understand them is not asked
again in that life. One that does not answer is counted, logged once, and asked again: it costs
cache hits, never a request. All questions go over one connection, for as long as it stands: a new
one for each would cost the worker as much as most answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Access, Address
from ownerserve.gateway.http.fetching import KeptLine
from ownerserve.kv.wire.inventory import decode_page
from ownerserve.kv.wire.rpc import NEWS_WAIT_MS
from ownerserve.router.fleet import Fleet
from ownerserve.router.residents import News, Residents
from ownerserve.router.worker import Worker

log = logging.getLogger("ownerserve.gateway")

PATH = b"/ownerserve/inventory?after=%d"
WAIT = b"&wait_ms=%d"
PAGES_A_ROUND = 64
NOT_NOW = (401, 403, 429, 500, 503)
"""The answers of one who may know, and does not say it now or to us."""


class InventoryReader:
    """The reader asks one worker for its inventory and tells what is new."""

    def __init__(
        self,
        address: Address,
        config: Config,
        *,
        access: Access,
        fleet: Fleet,
        tell: Callable[[News], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.residents = Residents(address.worker)
        self._address = address
        self._line = KeptLine(address, access)
        self._timeout_s = config.health_timeout_s
        self._news_s = None if config.news_ms is None else config.news_ms / 1e3
        self._fleet = fleet
        self._tell = tell
        self._is_called = asyncio.Event()
        self._silent_life: int | None = None
        """The worker's life in which it does not know the question."""
        self._is_warned = False

    async def run(self) -> None:
        """Read at every call, and what follows, until cancelled; at none where there is to be no
        news."""
        try:
            while True:
                await self._is_called.wait()
                self._is_called.clear()
                while await self._follow(self._news_s or 0.0):
                    pass
        finally:
            self.close()

    def close(self) -> None:
        """End the connection to the worker; another reading would open one."""
        self._line.close()

    async def _follow(self, news_s: float) -> bool:
        """Read what is new, waiting for it at the worker; return whether to go on without a
        call."""
        loop, words = asyncio.get_running_loop(), self.counts["words"]
        asked_s = loop.time()
        if not await self.read(wait_ms=NEWS_WAIT_MS):
            return False
        if self.counts["words"] > words:
            await asyncio.sleep(news_s)
            return True
        return loop.time() - asked_s >= NEWS_WAIT_MS / 2e3  # else it does not hold questions

    def call(self) -> None:
        """Ask for a reading, as the worker is up and there may be something new."""
        self._is_called.set()

    async def read(self, *, wait_ms: int = 0) -> bool:
        """Read what is new, once, waiting for it at the worker; return whether that went well.
        Whatever goes wrong, the next time may be better."""
        worker = self._worker()
        if self._news_s is None or worker is None or worker.life == self._silent_life:
            return False
        try:
            async with asyncio.timeout(self._timeout_s + wait_ms / 1e3):
                for _ in range(PAGES_A_ROUND):
                    if not await self._read_page(worker, wait_ms):
                        return self.residents.is_caught_up
                    wait_ms = 0
        except OSError as error:  # TimeoutError too
            self._failed(f"{type(error).__name__}: {error}")
        except Exception:  # a task's root: a worker that nobody reads would seem to hold all it had
            self.counts["failed"] += 1
            log.exception("worker %s: its inventory could not be taken in", self._address.worker)
        return False

    async def _read_page(self, worker: Worker, wait_ms: int) -> bool:
        """Ask for one page and tell its news; return whether there is more to be asked for."""
        asked, life = self.residents.after, worker.life
        target = PATH % asked + (WAIT % wait_ms if wait_ms else b"")
        answer = await self._line.fetch(target)
        if worker.life != life:
            return False  # its answer may be that of a former life
        page = decode_page(answer.body, after=asked) if answer.is_good else None
        if page is None:
            if answer.status in NOT_NOW:
                self._failed(f"status {answer.status}")
            else:
                self._is_no_answer(worker)
            return False
        if page.incarnation != worker.incarnation:
            return False  # the probe will tell of the new life, and it is asked then
        self._is_warned = False
        self.counts["pages"] += 1
        self.counts["words"] += len(page.words)
        self._say(self.residents.take(page, asked=asked))
        return not self.residents.is_caught_up

    def _is_no_answer(self, worker: Worker) -> None:
        """Take the worker for another engine, which knows no inventory: what a former life of it
        said counts no longer."""
        self._silent_life = worker.life
        if worker.incarnation is not None:
            self._say(self.residents.silent(worker.incarnation))

    def _say(self, news: list[News]) -> None:
        for one in news:
            self._tell(one)

    def _worker(self) -> Worker | None:
        """Return the worker's first rank that is up; None when there is none."""
        for worker in self._fleet:
            if worker.id == self._address.worker and worker.up:
                return worker
        return None

    def _failed(self, why: str) -> None:
        self.counts["failed"] += 1
        if not self._is_warned:
            self._is_warned = True
            log.warning("worker %s: its inventory can't be read: %s", self._address.worker, why)
