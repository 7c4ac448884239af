"""Whoever asks what is new in an inventory, and nothing is, waits here for the next word.

Owns who waits, NEWS_WAITERS at most: beyond, and with every word, the answer is to be given at
once. It never waits itself and keeps no word: what is asked for afterwards is the inventory's page.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock

from ownerserve.node.ownership.inventory import Inventory, Word

NEWS_WAITERS = 64


class NewsWaiters:
    """The waiters are those who read one inventory to its end. Any thread may ask."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._lock = Lock()
        self._waiting: list[Future[None]] = []
        inventory.watch(self._said)

    def __len__(self) -> int:
        """Return how many wait now."""
        return len(self._waiting)

    def wait(self, after: int) -> Future[None]:
        """Return a future that is done with the next word, or now where there is one already with a
        number above `after`. Who gives it up cancels it."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting = [other for other in self._waiting if not other.done()]
            if self._inventory.last == after and len(self._waiting) < NEWS_WAITERS:
                self._waiting.append(future)
                return future
        future.set_result(None)
        return future

    def _said(self, word: Word) -> None:
        """End all waiting; called with each word, and nearly always nobody waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
