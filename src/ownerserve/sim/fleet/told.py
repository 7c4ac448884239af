"""This module carries what the workers of a simulated fleet say that they hold to its router, as a
gateway hears it.

    inventory says a word ──> the batch of this instant ── delay_s ──> Residents ──> the router

Owns one reader a worker (router.residents, production's own) and the batches under way. A batch of
a life that has ended meanwhile is lost, as its connection is; the next life begins with all that it
has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.node.ownership.inventory import Word
from ownerserve.router.residents import News, Residents
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.worker.worker import SimWorker

Tell = Callable[[News, float], object]


class ResidencyNews:
    """Each word reaches the router `delay_s` seconds after it was said, all of one instant
    together. `tell` is given what is new."""

    def __init__(self, heap: Heap, tell: Tell, *, delay_s: float) -> None:
        self._heap = heap
        self._tell = tell
        self._delay_s = delay_s
        self._residents: dict[WorkerId, Residents] = {}

    def join(self, worker: SimWorker) -> None:
        """Begin to hear a worker's life that is up now, with all that it holds already."""
        residents = self._residents.setdefault(worker.name, Residents(worker.name))
        line = _Line(self._heap, self._tell, worker, residents=residents, delay_s=self._delay_s)
        inventory = worker.machine.node.inventory
        line.begin(tuple(inventory), inventory.last)
        inventory.watch(line.said)


class _Line:
    """A line carries one life's words; `said` is called with each."""

    def __init__(
        self, heap: Heap, tell: Tell, worker: SimWorker, *, residents: Residents, delay_s: float
    ) -> None:
        self._heap = heap
        self._tell = tell
        self._worker = worker
        self._life: Incarnation = worker.incarnation
        self._residents = residents
        self._delay_s = delay_s
        self._batch: list[Word] = []
        self._batch_s = -1.0

    def begin(self, words: Sequence[Word], last: int) -> None:
        """Send what the life holds as it is heard for the first time."""
        page = self._page(words, last)
        self._heap.at(self._heap.now + self._delay_s, lambda now: self._arrive(page, 0, now))

    def said(self, word: Word) -> None:
        """Put a word into the batch of this instant, which is on its way."""
        now = self._heap.now
        if self._batch_s != now:
            self._batch, self._batch_s = [], now
            self._heap.at(now + self._delay_s, partial(self._next, self._batch))
        self._batch.append(word)

    def _next(self, batch: list[Word], now: float) -> None:
        self._arrive(self._page(batch, batch[-1].number), self._residents.after, now)

    def _arrive(self, page: Page, asked: int, now: float) -> None:
        if not self._worker.is_up or self._worker.incarnation != self._life:
            return  # its connections are broken
        for news in self._residents.take(page, asked=asked):
            self._tell(news, now)

    def _page(self, words: Sequence[Word], last: int) -> Page:
        """Return the words as a page in the router's tokens and without digests, which differ too:
        a node counts units of its trace here."""
        told = tuple([_in_tokens(word, self._worker.unit_tokens) for word in words])
        return Page(self._life, 0, 0, last, told)


def _in_tokens(word: Word, unit_tokens: int) -> Has | Lost:
    if isinstance(word, Lost):
        return word
    return replace(word.said(), tokens=word.tokens * unit_tokens, prefix_hash="")
