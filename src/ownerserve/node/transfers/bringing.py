"""Bringing is a node's transfers in a process that lends nothing: it reads what peers lend, by what
was offered in another process of its worker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.messages import RoutingUnit
from ownerserve.node.transfers.counting import BringCounts, named
from ownerserve.node.transfers.landings import Landings
from ownerserve.node.transfers.lenders import Lenders, no_engine
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.roads import NodeRoads
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.plan.cost.events import Loaded
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.tcp.handshake import transfer_key
from ownerserve.transfer.movers.tcp.settings import ReaderSettings


class BringNews(msgspec.Struct, frozen=True):
    """`BringNews` are what was counted since they were last taken, by the names of
    `counting.named`, and what whole brings took."""

    counts: Mapping[str, int] = {}
    timings: tuple[Loaded, ...] = ()


class BringTally:
    """A `BringTally` knows what of a process's counts was told to the process that tells them."""

    def __init__(self, counts: Callable[[], BringCounts], timings: deque[Loaded]) -> None:
        self._counts, self._timings = counts, timings
        self._told: Counter[str] = Counter()

    def take(self) -> BringNews:
        """Return what is new since the last call."""
        now = Counter(named(self._counts()))
        counts, self._told = now - self._told, now
        timings = list[Loaded]()
        while self._timings:  # nobody else takes from it
            timings.append(self._timings.popleft())
        return BringNews(dict(counts), tuple(timings))


class Bringing:
    """`Bringing` is at work from when it is made until `stop`; `unit` is what peers know it by."""

    def __init__(
        self,
        unit: RoutingUnit,
        sections: Mapping[str, PayloadSection],
        *,
        block_tokens: int,
        place: TransferPlace,
    ) -> None:
        key = None if place.key is None else transfer_key(place.key)
        roads = NodeRoads(key, place.roads, settings=ReaderSettings(interface=place.interface))
        landings = Landings(sections, place.landing_bytes)
        self._service = TransferService(
            lambda loop: (
                SourceSide(unit, Lenders(None), no_engine, digests=Xxh3(), loop=loop),
                TargetSide(unit, landings, roads, key=place.key, loop=loop),
            )
        )
        self.peers = Peers(self._service, sections, block_tokens)
        self._tally = BringTally(self.counts, self.peers.timings)
        self._service.start()

    def counts(self) -> BringCounts:
        """Return what came of brings; any thread may call."""
        peers, target = self.peers, self._service.target
        return BringCounts(
            looks=dict(peers.looks),
            brings=dict(peers.brings),
            brought_bytes=dict(peers.brought_bytes),
            read_bytes=target.read_bytes,
            read_failures=target.read_failures.copy(),
        )

    def take(self) -> BringNews:
        """Return what is new since the last call, for the process that tells it."""
        return self._tally.take()

    def stop(self) -> None:
        """Bring nothing any more; who waits for something hears."""
        self._service.stop()
