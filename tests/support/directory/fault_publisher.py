"""A worker's inventory in a fault schedule, told to the directory as its thread tells it.

One message is under way at a time and goes again until it is answered, as over one connection; the
request or its answer may be lost, and the directory may be away or forget. When all is well, what
the directory says of a life is what its inventory says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.records import PrefixRecord
from ownerserve.directory.messages import DirectoryRefusal
from ownerserve.directory.owner.state import OwnerPhase
from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Term
from ownerserve.node.ownership.publishing import Publishing
from tests.support.directory.fault_net import Violation
from tests.support.node.node_driver import B

if TYPE_CHECKING:
    from tests.support.directory.fault_process import Process

LOST = 0.15
SCOPE = bytes(32)


class Publisher:
    """One life's."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._state = process.node.state
        self.publishing = Publishing(
            process.unit, self._state.inventory, scope=SCOPE, digest_at=self._digest_at
        )
        self._memory: Term | None = None

    def leased(self, memory: Term | None) -> None:
        """The directory counts this life among the living."""
        if memory != self._memory:
            self._memory = memory
            self.publishing.forgotten()

    def tick(self) -> None:
        """A frame goes, now and then."""
        owner, world = self._process.owner, self._process.world
        if owner.phase is not OwnerPhase.LIVE:
            return
        told = self.publishing.next(seen=owner.seen, ours=owner.grants, busy=())
        if told is None:
            return
        world.counts["published"] += len(told.extents)
        world.counts["told as gone"] += len(told.gone) + len(told.left)
        self.publishing.answered(self._sent(told))

    def _sent(self, told: ask.Publish) -> ask.Outcome:
        world = self._process.world
        net, nothing = world.net, ask.Refused(DirectoryRefusal.UNREACHABLE)
        chance = net.rng.random() if net.now_s < net.heal_s else 1.0
        if chance < LOST or net.now_s < world.away_until_s:
            return nothing
        outcome = world.ask_now(told)
        return nothing if chance < 2 * LOST else outcome

    def _digest_at(self, session: SessionId, tokens: int) -> PrefixHash | None:
        return self._state.chains.digest_at(session, tokens // B)

    def at_rest(self) -> None:
        """The directory knows what is here, and nothing else of this life."""
        process = self._process
        if process.owner.phase is not OwnerPhase.LIVE:
            return
        here, nameless = set(), set()
        for word in self._state.inventory:
            tier, said = TierCode[word.tier.upper()], PrefixHash(bytes.fromhex(word.prefix_hash))
            if said:
                here.add((self.publishing.name(said, SessionId(word.session)), tier))
            else:  # its name is that of the session's last prompt, as it was then
                nameless.add((word.tokens, tier))
        records = process.world.state.records
        known = {
            (PrefixHash(key[2:]), place.tier): (record.tokens, place.tier)
            for key, record in records.items()
            if isinstance(record, PrefixRecord) and len(key) == 2 + len(SCOPE)
            for place in record.locations
            if place.unit == process.unit
        }
        few = here - known.keys()
        many = [one for one in known.keys() - here if known[one] not in nameless]
        if few or many:
            problem = f"knows {len(many)} copies too many and {len(few)} too few"
            raise Violation(f"of {process.unit} the directory {problem}")
