"""All gateways that ask this API server for a worker's news share what its engine core says.

    gateway ── after=17 ──┐                       the newest words
    gateway ── after=19 ──┼──> SharedNews ──  (since ........ last]  <── PageIs: words above 19
    gateway ── after=19 ──┘        └────────── ListHeld(19), held ──> engine core

`SharedNews` owns the newest words, WORDS_KEPT at most, and the one question that the core holds for
all who follow its news here: nothing crosses while nothing is new. It answers what it can answer as
the core would have SHARED_S ago; whatever else is asked (words from before `since`, another life's
numbers, a question that is not to be held) goes to the core. What the core says of another life, or
its silence, ends all that is kept.

`InventoryAnswers` takes the question off before vLLM's own middleware and routes: these cost
several times what the answer does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any
from urllib.parse import parse_qsl

from starlette.responses import Response

from ownerserve.kv.wire.inventory import Page, Word
from ownerserve.kv.wire.rpc import NEWS_WAIT_MS, ListHeld, PageIs, Said
from ownerserve.node.ownership.inventory import PAGE_WORDS
from ownerserve.node.ownership.news import NEWS_WAITERS

INVENTORY = "/ownerserve/inventory"
SHARED_S = 0.05
"""How long the core is not asked after an answer, so that several words come together: as long as
gateways wait by default, from the same answer on."""
FOLLOWED_S = 1.0
"""How long the core is asked on after the last question came."""
WORDS_KEPT = PAGE_WORDS
ACCESS_LOG = "uvicorn.access"

Ask = Callable[[ListHeld], Awaitable[Said]]
"""Asks the engine core. Raises TimeoutError or another OSError when it is silent."""


class NewestWords:
    """The `NewestWords` are all words above `since` as of number `last`, of one life. A word
    replaces the former one of its session and tier."""

    def __init__(self) -> None:
        self.since = self.last = 0
        self._page: Page | None = None
        self._words: OrderedDict[tuple[str, str], Word] = OrderedDict()

    def __len__(self) -> int:
        """Return how many words are kept."""
        return len(self._words)

    def covers(self, after: int) -> bool:
        """Tell whether all words above `after` are here."""
        return self._page is not None and self.since <= after <= self.last

    def page(self, after: int) -> Page:
        """Return the words above `after`, which is covered."""
        assert self._page is not None
        newest = list(takewhile(lambda word: word.number > after, reversed(self._words.values())))
        page = self._page
        return Page(page.incarnation, page.rank, page.floor, self.last, tuple(newest[::-1]))

    def learn(self, page: Page, *, after: int) -> None:
        """Take in a page of words above `after`."""
        is_all = not page.words or page.words[-1].number == page.last
        upto = page.last if is_all else page.words[-1].number
        if not self._is_of(page):
            self.clear()
        if upto < after:
            return  # who asked has a number of another life
        if self._page is None or after > self.last:
            self._words.clear()
            self.since = self.last = after
        elif upto < self.last:
            return  # a later answer was here before
        self._page = page
        for word in page.words:
            if word.number > self.last:
                key = word.session, word.tier
                self._words.pop(key, None)
                self._words[key] = word
        self.last = upto
        while len(self._words) > WORDS_KEPT:
            self.since = self._words.popitem(last=False)[1].number

    def clear(self) -> None:
        """Forget all."""
        self._page = None
        self._words.clear()

    def _is_of(self, page: Page) -> bool:
        """Tell whether the page is of the life whose words are kept."""
        known = self._page
        return known is not None and (known.incarnation, known.rank) == (
            page.incarnation,
            page.rank,
        )


class SharedNews:
    """A `SharedNews` answers those who ask one API server for the news of one engine core; used on
    one event loop. NEWS_WAITERS wait for a word at most: beyond, the answer is given at once."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._newest = NewestWords()
        self._asked_s = 0.0
        """When the last question came."""
        self._waiting = 0
        self._follower: asyncio.Task[None] | None = None
        self._told: asyncio.Future[Said | None] | None = None
        """What the core says next; None: it is silent. There is one while it is followed."""

    async def answer(self, asked: ListHeld) -> Said:
        """Return the page that the core would answer with. Raises TimeoutError or another OSError
        when it is silent."""
        self._asked_s = _now()
        until_s = self._asked_s + asked.wait_ms / 1e3
        while asked.wait_ms and self._newest.covers(asked.after):
            is_news, left_s = asked.after < self._newest.last, until_s - _now()
            if is_news and self._told is None:
                break  # what is kept may be old
            if is_news or left_s <= 0 or self._waiting >= NEWS_WAITERS:
                return PageIs(self._newest.page(asked.after))
            told = self._told or self._follow()
            self._waiting += 1
            try:
                await asyncio.wait((told,), timeout=left_s)
            finally:
                self._waiting -= 1
            if told.done():
                said = told.result()
                if said is None:
                    raise TimeoutError
                if not isinstance(said, PageIs):
                    return said
        said = await self._ask(asked)
        if isinstance(said, PageIs):
            self._newest.learn(said.page, after=asked.after)
            if asked.wait_ms and self._told is None and self._newest.covers(asked.after):
                self._follow()
        return said

    def _follow(self) -> asyncio.Future[Said | None]:
        loop = asyncio.get_running_loop()
        self._told = loop.create_future()
        self._follower = loop.create_task(self._followed())
        return self._told

    async def _followed(self) -> None:
        """Ask the core for its next word again and again, as long as somebody follows the news
        here; what it says within SHARED_S of an answer comes together."""
        try:
            while self._waiting or _now() - self._asked_s < FOLLOWED_S:
                after = self._newest.last
                said = await self._ask(ListHeld(after, NEWS_WAIT_MS))
                if isinstance(said, PageIs):
                    self._newest.learn(said.page, after=after)
                told, self._told = self._told, asyncio.get_running_loop().create_future()
                if told is not None:
                    told.set_result(said)
                await asyncio.sleep(SHARED_S)
        except OSError:  # TimeoutError too: the core is silent, and nothing is known of it
            self._newest.clear()
        finally:
            told, self._told = self._told, None
            if told is not None:
                told.set_result(None)


News = Callable[[dict[str, str]], Awaitable[Response]]
"""Answers a question for the inventory, by the fields of its query."""


class InventoryAnswers:
    """`InventoryAnswers` is ASGI middleware that answers GET INVENTORY and hands all else on."""

    def __init__(self, app: Any, *, news: News) -> None:
        self._app = app
        self._news = news

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            scope["type"] == "http"
            and scope["path"].removeprefix(scope.get("root_path", "")) == INVENTORY
            and scope["method"] == "GET"
        ):
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
            app: Any = await self._news(query)
        else:
            app = self._app
        await app(scope, receive, send)


def leave_out_of_log() -> None:
    """Have the server's access log leave out questions for the inventory that were answered: they
    are many, and a line costs more than the answer."""
    log = logging.getLogger(ACCESS_LOG)
    if _is_told not in log.filters:
        log.addFilter(_is_told)


def _is_told(record: logging.LogRecord) -> bool:
    match record.args:
        case (_, "GET", str(path), _, 200):
            return not path.startswith(INVENTORY)
    return True


def _now() -> float:
    return time.monotonic()
