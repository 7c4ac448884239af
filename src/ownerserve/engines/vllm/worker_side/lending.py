"""A rank lends what its own store has, and brings its part of what a peer's ranks have.

    rpc port      Lend, More, Return of the peer's ranks
    books         a thread: what of it is here, and a lend's books
    transfer      the mover's port, and the stage's threads

Which sessions its records are of the scheduler's process knows (scheduler_side/lending.py): here
they are asked for by their ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from ownerserve.engines.vllm.stated_ranks import state_rank, withdraw_rank
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, RpcAnswer, RpcRequest
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.storage.backing import NodeTiers
from ownerserve.node.transfers.bringing import BringNews, BringTally
from ownerserve.node.transfers.lending import FoundRecord, SessionHint
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.ranks import RankHolders
from ownerserve.node.transfers.stored_lends import RecordForms

log = logging.getLogger("vllm.ownerserve")


class RankForms(msgspec.Struct, frozen=True):
    """`RankForms` are how the rank's records lie in its store, by component: their `descriptors`,
    and the `sections` of a unit."""

    descriptors: Mapping[str, bytes]
    sections: Mapping[str, PayloadSection]

    def descriptor(self, component: str) -> bytes:
        """Return the encoded descriptor of the component's records."""
        return self.descriptors[component]

    def slot_bytes(self, component: str) -> int:
        """Return the bytes of one unit of the component's records."""
        return self.sections[component].unit_bytes


class RankLending:
    """A `RankLending` is at work from when it is made until `stop`."""

    def __init__(
        self,
        unit: RoutingUnit,
        holders: RankHolders,
        store: NodeTiers,
        *,
        forms: RecordForms,
        place: TransferPlace,
        directory: Path,
    ) -> None:
        """Open its ports: the mover's at `place`, and one behind it where it is asked. What it is
        stands in `directory`. Raises InvalidInput where a port can't be had, OSError where nothing
        can be left there."""
        block = next(iter(holders.values())).block_tokens
        sections = {name: one.section for name, one in holders.items()}
        self.transfers = NodeTransfers(unit, None, sections, block_tokens=block, place=place)
        self._store, self._block, self._directory = store, block, directory
        self.transfers.lend_records(forms, self._find, store)
        self.transfers.state(holders)
        self._books = ThreadPoolExecutor(1, "ownerserve-lends")
        try:
            asked = place.port and place.port + 1
            self._rpc = RpcServer(host=place.host, port=asked, key=place.key)
        except BaseException:
            self.transfers.stop()
            raise
        self._tally = BringTally(self.transfers.counts, self.peers.timings)
        self.transfers.start(self._books.submit)
        self._rpc.start(self.transfers.answering(_nothing_else))
        self.stated = LendingRank(LenderAddress(unit, self._rpc.address), tuple(holders.values()))
        try:
            state_rank(directory, self.stated)
        except OSError:
            self.stop()
            raise

    @property
    def peers(self) -> Peers:
        """Return what other workers hold, as this rank reads it."""
        return self.transfers.peers

    def take(self) -> BringNews:
        """Return what was lent and brought since the last call."""
        return self._tally.take()

    def stop(self) -> None:
        """Lend and bring nothing any more; who waits for something hears."""
        withdraw_rank(self._directory)
        self._rpc.stop()
        self.transfers.stop()
        self._books.shutdown(wait=False)

    def _find(self, hint: SessionHint, ids: Sequence[bytes]) -> Mapping[bytes, FoundRecord]:
        """Return what stands in the store of these, whosever it is: who knows an id may read it."""
        return {
            id_: FoundRecord(
                record.meta.component,
                record.meta.first_token // self._block,
                record.meta.end_token // self._block,
            )
            for id_, record in self._store.find(ids).items()
        }


def _nothing_else(request: RpcRequest) -> Future[RpcAnswer]:
    """Refuse what is not about lends: that is asked of the engine core."""
    answer: Future[RpcAnswer] = Future()
    answer.set_result(Reject(WorkerRefusal.UNKNOWN_RESERVATION))
    return answer
