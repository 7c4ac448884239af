"""One simulated worker without an engine's time: turns are computed at once, state moves as media
let it. What a test says happens in simulated seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, pack
from ownerserve.kv.registry import build_spec as spec_of
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.units import GIB
from ownerserve.node.vocabulary.events import RestoreOutcome, RestoreReport, TurnArrived, TurnEnded
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.sim.storage.layout import UnitModel, slots_for, unit_model
from ownerserve.sim.storage.nodeport import SimNode, make_node, unit_settings
from ownerserve.sim.storage.store import SimStore
from ownerserve.sim.storage.tier import SimTier, TierPlan
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link, linked
from ownerserve.sim.timeline.media import Duplex, duplex
from ownerserve.store.tiers.placement import Placement
from ownerserve.store.tiers.policy import split

U = 64
PREFILL = Coefficients(10.0, 0.05, 2e-7)


def geometry_of(config: str) -> Geometry:
    return Geometry.of(spec_of(read_config(find_config(config))))


def host(size_bytes: int = 64 * GIB) -> SimTier:
    medium = Medium(0.01, 50e6)
    return SimTier(TierPlan(tier=Tier.HOST, limits=split(size_bytes), read=medium, write=medium))


def disk(size_bytes: int = 512 * GIB, budget: tuple[float, float] | None = None) -> SimTier:
    return SimTier(
        TierPlan(
            tier=Tier.DISK,
            limits=split(size_bytes),
            read=Medium(0.3, 6e6),
            write=Medium(0.3, 3e6),
            budget=budget,
        )
    )


def remote(heap: Heap, size_bytes: int = 4096 * GIB) -> SimTier:
    medium = Medium(8.0, 2e6)
    plan = TierPlan(tier=Tier.REMOTE, limits=split(size_bytes), read=medium, write=medium)
    return SimTier(plan, shared=linked("remote", medium, heap))


class Ran(msgspec.Struct, frozen=True):
    """What came of a turn: when it started after it arrived, and from where."""

    report: RestoreReport
    waited_s: float
    restored: int
    write_floor: int


class SimNodeDriver:
    """See the module. Unit ids come from `fresh`: no two of a run are alike by chance."""

    def __init__(
        self,
        tiers: Sequence[SimTier],
        *,
        config: str = "qwen3-30b-a3b",
        hbm_bytes: int = 40 * GIB,
        heap: Heap | None = None,
        placement: Placement | None = None,
        shared: Duplex[Link] | None = None,
    ) -> None:
        """`shared`: a host's link in place of PCIe of the worker's own."""
        self.heap = heap or Heap()
        self._shared = shared
        self.model: UnitModel = unit_model(geometry_of(config), U)
        self.block = self.model.layout.block_tokens
        nic = linked("nic", Medium(0.05, 12e6), self.heap)
        self.store = SimStore(tiers, placement=placement, nic=nic)
        self.hbm_bytes = hbm_bytes
        self.started: dict[TurnId, float] = {}
        self._turns = 0
        self.boot()

    def boot(self) -> None:
        """A worker with an empty device over the store as it is."""
        sizes = slots_for(self.model.layout, self.hbm_bytes, 8)
        self.cache = HeteroCache(self.model.layout, sizes.slots, sizes.state_slots)
        self.pcie = duplex("pcie", Medium(0.02, 50e6))
        settings = unit_settings(self.model, spill_after_s=1.0)
        state = make_node(
            self.cache,
            self.model,
            PREFILL,
            store=self.store,
            pcie=self._shared or self.pcie,
            settings=settings,
        )
        pcie = self._shared or self.pcie
        self.node = SimNode(
            state, self.store, pcie, at=self.heap.at, started=self.started.__setitem__
        )

    def crash(self) -> None:
        """The process dies and another one comes up."""
        self.node.die()
        self.boot()

    def arrive(self, session: str, ids: list[int]) -> TurnId:
        self._turns += 1
        turn_id = TurnId(f"t{self._turns}")
        event = TurnArrived(turn_id, SessionId(session), pack(ids))
        self.node.handle(event, self.heap.now)
        return turn_id

    def turn(self, session: str, ids: list[int], output: int = 2) -> Ran:
        """Arrive, wait for state, compute, end. `ids` grows by the output."""
        arrived_s = self.heap.now
        turn_id = self.arrive(session, ids)
        while turn_id not in self.started:
            due_s = self.heap.next_s()
            assert due_s is not None, "nothing will ever start it"
            self.heap.run(due_s)
        return self.run(turn_id, session, ids, output, waited_s=self.heap.now - arrived_s)

    def run(
        self, turn_id: TurnId, session: str, ids: list[int], output: int, *, waited_s: float
    ) -> Ran:
        now, prompt = self.heap.now, len(ids)
        report = self.node.state.report(turn_id)
        if report is None and not self.store.tiers:
            report = RestoreReport(RestoreOutcome.RESIDENT, None, waited_s)
        assert report is not None
        resume = self.node.resume(pack(ids))
        begun = self.cache.begin(Turn(turn_id, SessionId(session), pack(ids)), now, resume=resume)
        assert isinstance(begun, Begun)
        ids += self.fresh(output)
        assert not isinstance(self.cache.reserve(turn_id, len(ids), now), NoRoom)
        self._compute(turn_id, begun, ids, prompt)
        self.cache.finish(turn_id, now)
        self.node.handle(TurnEnded(turn_id, begun.restored, prompt, len(ids)), now)
        return Ran(report, waited_s, begun.restored, begun.write_floor)

    def _compute(self, turn_id: TurnId, begun: Begun, ids: list[int], prompt: int) -> None:
        b, packed, at = self.block, pack(ids), begun.restored
        stops = {(prompt - 1) // b * b, prompt // b * b, len(ids) // b * b, len(ids)}
        for stop in sorted(stop for stop in stops if stop > at):
            tokens = packed[at * TOKEN_BYTES : stop * TOKEN_BYTES]
            self.cache.advance(turn_id, tokens, self.heap.now)
            at = stop
            if at % b == 0 and at >= begun.write_floor:
                self.cache.snapshot(turn_id, self.heap.now)

    _next = 0

    def fresh(self, count: int) -> list[int]:
        SimNodeDriver._next += count
        return list(range(SimNodeDriver._next - count, SimNodeDriver._next))

    def rest(self, seconds: float = 30.0) -> None:
        """Time passes."""
        until_s = self.heap.now + seconds
        self.heap.run(until_s)
        self.heap.now = until_s

    def forget_device(self) -> None:
        """Everything evictable goes."""
        count = self.cache.occupancy.evictable_blocks()
        if count:
            self.cache.pressure.evict_blocks(count)

    def check(self) -> None:
        self.node.state.check()
        self.store.check()
