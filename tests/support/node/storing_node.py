"""A node with a store, whose session was put away there: what it lends is read from below its
device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ownerserve.kv.ids import SessionId
from ownerserve.kv.units import MIB
from ownerserve.node.ownership.inventory import Inventory, Residency
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.storage.backing import Backing, NodeTiers, open_backing
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.events import PeerRecord
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import tip_of
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Prices
from ownerserve.store.format.model import Meta
from ownerserve.store.tiers.backend import Reservation
from tests.support.node.lending_nodes import AGENT, NAMES, PROMPT, B, Node

BLOCKS = 10
OTHERS = [SessionId(f"{number:032x}") for number in range(8)]


class StoringNode(Node):
    """A node with a store, into which the prompt's session was copied, as an idle one's is."""

    def __init__(self, folder: Path | None, *, stage_bytes: int = MIB, life: int = 1000) -> None:
        super().__init__("near", place=TransferPlace(stage_bytes=stage_bytes), life=life)
        backing = open_backing(folder, 0 if folder else MIB)
        assert backing is not None
        self.backing: Backing = backing
        self.residency = Residency(NAMES, Inventory(), Operations(), can_replay=False)
        self.transfers.lend_stored(NAMES, self.residency, self.tiers, prices=prices)

    @property
    def tiers(self) -> NodeTiers:
        return self.backing.tiers

    @property
    def used_bytes(self) -> int:
        """What is taken of its lend memory."""
        return self.transfers.counts().stage_used_bytes

    def copy(self, prompt: Sequence[int] = PROMPT) -> None:
        """Copy what the device has of the prompt: its ranges, and the point at its end."""
        digests = prefix_of(prompt, B).hashed.digests
        for end in NAMES.ends(BLOCKS):
            cell = NAMES.cell_ending_at(end)
            meta = NAMES.range_meta("dense", cell, digests)
            self._store(meta, self.bytes_of(PeerRecord("dense", cell.first, cell.end)))
        point = NAMES.point_meta("swa", BLOCKS, digests)
        self._store(point, self.bytes_of(PeerRecord("swa", BLOCKS, BLOCKS)))
        tip = tip_of(NAMES, AGENT, BLOCKS, digests=digests, points=(BLOCKS,))
        self.between(lambda: self.residency.copied(tip, 0.0)).result()

    def _store(self, meta: Meta, payload: bytes) -> None:
        room = self.tiers.reserve(meta, len(payload))
        assert isinstance(room, Reservation)
        room.payload[:] = payload
        self.tiers.commit([room])

    def evict(self) -> None:
        """Others take all the room of the device."""
        self.between(lambda: self.cache.sessions.let_go(AGENT)).result()
        for number, session in enumerate(OTHERS):
            self.turn(session, [1000 + number] * (10 * B + 1))
        assert not self.cache.residents.tokens_of(AGENT)

    def close(self) -> None:
        super().close()
        self.backing.close()


def prices() -> Prices:
    return CostModel(UNMEASURED).prices()


def put_away(node: StoringNode) -> dict[PeerRecord, bytes]:
    """The session is in the store alone; what its device had of it."""
    node.turn(AGENT, PROMPT)
    node.copy()
    ranges = [PeerRecord("dense", *ends) for ends in ((0, 4), (4, 8), (8, 10))]
    before = {one: node.bytes_of(one) for one in (*ranges, PeerRecord("swa", 10, 10))}
    node.evict()
    return before
