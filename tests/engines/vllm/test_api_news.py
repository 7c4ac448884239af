"""What one engine core says is shared by all who ask its API server, and is what it would have told
each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from ownerserve.engines.vllm.api_news import WORDS_KEPT, NewestWords, SharedNews
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.inventory import Lost, Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import ListHeld, PageIs, Reject, Said
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.news import NewsWaiters
from tests.support.waits import WAIT_S

LONG_MS = 60_000
"""Longer than any test: who waits so long hears of a word."""


class Core:
    """An engine core: a real inventory, and questions for it, held as they ask. `asked`: those
    that came; `most`: how many of them it held at once."""

    def __init__(self) -> None:
        self.asked: list[ListHeld] = []
        self.most = self.held = 0
        self.incarnation = 1
        self.is_silent = False
        self.refuses: Reject | None = None
        self.inventory = Inventory()
        self._waiters = NewsWaiters(self.inventory)

    def say(self, name: str, tokens: int) -> None:
        self.inventory.has(SessionId(name), Tier.DEVICE, tokens, digest=None)

    def restart(self) -> None:
        self.incarnation += 1
        self.say("last", 32)  # ends all holding
        self.inventory = Inventory()
        self._waiters = NewsWaiters(self.inventory)

    async def ask(self, asked: ListHeld) -> Said:
        self.asked.append(asked)
        await asyncio.sleep(0)
        if asked.wait_ms:
            waiting = asyncio.wrap_future(self._waiters.wait(asked.after))
            self.held += 1
            self.most = max(self.most, self.held)
            await asyncio.wait((waiting,), timeout=asked.wait_ms / 1e3)
            self.held -= 1
        if self.is_silent:
            raise TimeoutError
        if self.refuses is not None:
            return self.refuses
        return PageIs(self.inventory.page(asked.after, incarnation=self.incarnation))


def played(play: Callable[[Core, SharedNews], Awaitable[None]]) -> None:
    async def run() -> None:
        core = Core()
        async with asyncio.timeout(WAIT_S):
            await play(core, SharedNews(core.ask))

    asyncio.run(run())


async def page(news: SharedNews, after: int, *, wait_ms: int = LONG_MS) -> Page:
    said = await news.answer(ListHeld(after, wait_ms))
    assert isinstance(said, PageIs)
    return said.page


def test_all_who_wait_share_one_question_and_hear_the_same() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        assert (await page(news, 0)).last == 1
        waiting = [asyncio.ensure_future(page(news, 1)) for _ in range(4)]
        while not core.held:
            await asyncio.sleep(0)
        core.say("b", 64)
        told = await asyncio.gather(*waiting)
        assert [word.session for one in told for word in one.words] == ["b"] * 4
        assert core.most == 1

    played(play)


def test_who_is_behind_is_told_what_another_one_has_heard() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        for number, name in enumerate("bca", 1):
            waiting = asyncio.ensure_future(page(news, number))
            while not core.held:
                await asyncio.sleep(0)
            core.say(name, 64)
            assert (await waiting).words[0].session == name
        asked = len(core.asked)
        told = await page(news, 2)
        assert [(word.number, word.session) for word in told.words] == [(3, "c"), (4, "a")]
        assert all(one.after == 4 for one in core.asked[asked:])

    played(play)


def test_words_that_nobody_follows_are_asked_for_anew() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0, wait_ms=0)
        core.say("b", 64)
        assert [word.session for word in (await page(news, 0)).words] == ["a", "b"]

    played(play)


def test_the_core_is_left_alone_when_nobody_asks_any_more() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        assert not (await page(news, 1, wait_ms=1)).words
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
        assert not core.held
        core.say("b", 64)
        assert (await page(news, 1)).last == 2, "and it is asked again"

    played(play)


def test_a_question_that_does_not_wait_is_the_cores() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        for asked in range(1, 4):
            assert (await page(news, 0, wait_ms=0)).last == 1
            assert len(core.asked) == asked

    played(play)


def test_numbers_of_another_life_are_the_cores_to_answer() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        for tokens in (32, 64, 96):
            core.say("a", tokens)
        await page(news, 0)
        core.restart()
        core.say("b", 32)
        told = await page(news, 3)
        assert (told.incarnation, told.last, told.words) == (2, 1, ())
        told = await page(news, 0)
        assert [(word.session, word.number) for word in told.words] == [("b", 1)]

    played(play)


def test_a_life_that_ends_under_those_who_wait_is_no_news_of_the_next() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        core.restart()
        for tokens in (32, 64):
            core.say("b", tokens)
        told = await asyncio.gather(page(news, 1), page(news, 1))
        assert {one.incarnation for one in told} == {2}

    played(play)


def test_a_silent_core_is_told_and_nothing_is_kept_of_it() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        core.is_silent = True
        core.say("b", 32)
        said = await asyncio.gather(page(news, 1), page(news, 1), return_exceptions=True)
        assert all(isinstance(one, TimeoutError) for one in said)
        core.is_silent = False
        before = len(core.asked)
        assert (await page(news, 0)).last == 2
        assert core.asked[before] == ListHeld(0, LONG_MS)

    played(play)


def test_a_refusal_is_handed_on() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        core.refuses = Reject(WorkerRefusal.ENGINE_BUSY)
        core.say("b", 32)
        assert await news.answer(ListHeld(1, LONG_MS)) == core.refuses

    played(play)


def test_who_has_waited_for_long_enough_is_told_that_there_is_nothing() -> None:
    async def play(core: Core, news: SharedNews) -> None:
        core.say("a", 32)
        await page(news, 0)
        other = asyncio.ensure_future(page(news, 1))
        told = await page(news, 1, wait_ms=5)
        assert (told.last, told.words) == (1, ())
        core.say("b", 32)
        assert (await other).last == 2

    played(play)


SAYS = st.tuples(st.just("say"), st.integers(0, 7), st.integers(0, 3))
READS = st.tuples(st.just("read"), st.integers(0, 40), st.integers(1, 6))
LIVES = st.tuples(st.just("restart"), st.just(0), st.just(0))


@given(st.lists(SAYS | READS | LIVES, max_size=60))
def test_what_is_kept_is_what_the_core_would_say(steps: list[tuple[str, int, int]]) -> None:
    """Pages of any size, from any number on, of lives that come and go: whatever is covered and up
    to date is the core's own page, word by word (but for losses that the core has forgotten)."""
    newest, life, inventory = NewestWords(), 1, Inventory(gone_kept=3)
    for what, one, two in steps:
        if what == "say":
            inventory.has(SessionId(str(one)), Tier.DEVICE, 32 * two, digest=None)
        elif what == "restart":
            life, inventory = life + 1, Inventory(gone_kept=3)
            newest.learn(inventory.page(0, incarnation=life), after=0)
        else:
            read = inventory.page(one, incarnation=life, words=two)
            newest.learn(read, after=one)
        if newest.last != inventory.last:
            continue
        for after in range(inventory.last + 1):
            if newest.covers(after):
                ours, theirs = newest.page(after), inventory.page(after, incarnation=life)
                forgotten = [word for word in ours.words if word not in theirs.words]
                assert all(isinstance(word, Lost) for word in forgotten)
                assert set(theirs.words) <= set(ours.words)
                numbers = [word.number for word in ours.words]
                assert numbers == sorted(set(numbers))


def test_words_are_bounded_and_those_before_are_not_covered() -> None:
    newest, inventory = NewestWords(), Inventory()
    for name in range(2 * WORDS_KEPT):
        inventory.has(SessionId(str(name)), Tier.DEVICE, 32, digest=None)
        newest.learn(inventory.page(name, incarnation=1), after=name)
    assert len(newest) == WORDS_KEPT
    assert newest.since == WORDS_KEPT and not newest.covers(WORDS_KEPT - 1)
    assert len(newest.page(newest.since).words) == WORDS_KEPT
