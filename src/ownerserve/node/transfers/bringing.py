"""Bringing is a node's transfers in a process that lends nothing: it reads what peers lend, by what
was offered in another process of its worker.
"""

from __future__ import annotations

from collections.abc import Mapping

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.messages import RoutingUnit
from ownerserve.node.transfers.lenders import Lenders, no_engine
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.roads import NodeRoads
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.tcp.handshake import transfer_key
from ownerserve.transfer.movers.tcp.settings import ReaderSettings


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
        self._service = TransferService(
            lambda loop: (
                SourceSide(unit, Lenders(None), no_engine, digests=Xxh3(), loop=loop),
                TargetSide(unit, sections, roads, key=place.key, loop=loop),
            )
        )
        self.peers = Peers(self._service, sections, block_tokens)
        self._service.start()

    def stop(self) -> None:
        """Bring nothing any more; who waits for something hears."""
        self._service.stop()
