"""This module reads what the workers of a simulated fleet say that they hold, as a gateway reads
it.

Owns one reader a worker (router.residents, production's own) and when each was last asked: a
gateway asks with each probe, here it is done when somebody would notice, before a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ownerserve.kv.wire.inventory import Has, Page
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.router.residents import News, Residents
from ownerserve.sim.worker.worker import SimWorker

READ_EVERY_S = 1.0
"""The router reads inventories as often as a gateway probes."""


class InventoryReaders:
    """The readers are one for each worker of a fleet. `tell` is given what is new."""

    def __init__(self, workers: Sequence[SimWorker], tell: Callable[[News, float], object]) -> None:
        self._workers = workers
        self._tell = tell
        self._residents: list[Residents] = []
        self._read_of: list[Inventory | None] = []
        """The inventory that each reader has read from; another life has one of its own."""
        self._read_s = float("-inf")

    def look(self, now: float) -> None:
        """Read what is new at all workers, unless that was done a short time ago."""
        if now - self._read_s < READ_EVERY_S:
            return
        self._read_s = now
        for worker in self._workers[len(self._residents) :]:
            self._residents.append(Residents(worker.name))
            self._read_of.append(None)
        for worker, residents in zip(self._workers, self._residents, strict=True):
            if worker.is_up:
                self._read(worker, residents, now)

    def _read(self, worker: SimWorker, residents: Residents, now: float) -> None:
        inventory = worker.machine.node.inventory
        if inventory is self._read_of[worker.index] and inventory.last == residents.after:
            return  # it has said nothing since
        self._read_of[worker.index] = inventory
        while True:
            asked = residents.after
            page = inventory.page(asked, incarnation=worker.incarnation)
            for news in residents.take(_in_tokens(page, worker.unit_tokens), asked=asked):
                self._tell(news, now)
            if residents.is_caught_up:
                return


def _in_tokens(page: Page, unit_tokens: int) -> Page:
    """Return the page in the router's tokens and without digests, which differ too: a node counts
    units of its trace here."""
    words = tuple(
        msgspec.structs.replace(word, tokens=word.tokens * unit_tokens, prefix_hash="")
        if isinstance(word, Has)
        else word
        for word in page.words
    )
    return msgspec.structs.replace(page, words=words)
