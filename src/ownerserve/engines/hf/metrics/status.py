"""The status is what a worker says about itself, dated. Read from the cache and the scheduler; owns
nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Layout
from ownerserve.engines.hf.scheduling.step import SchedulerLoad
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.status import (
    ProfileStatement,
    RefillShare,
    WorkerLoad,
    WorkerStatus,
    load_statement,
    unit_statement,
)
from ownerserve.node.runtime.stating import actions_of, speed_statement, tier_statements
from ownerserve.plan.cost.model import CostModel


class SlotUse(msgspec.Struct, frozen=True):
    """A `SlotUse` counts the slots of one pool. `free` ones are unused now; more can be evicted."""

    capacity: int
    free: int


class DeviceStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A `DeviceStatement` tells of the reference engine's pools, for people: slots by component,
    sessions, steps so far, and the order of eviction (cache.policies)."""

    block_tokens: int
    sessions: int
    slots: dict[str, int]
    free_slots: dict[str, int]
    slot_bytes: dict[str, int]
    evictable_blocks: int
    eviction: str
    steps: int


class HfStatus(WorkerStatus, frozen=True, kw_only=True):
    """An `HfStatus` is a worker's record, with what only this engine tells."""

    device: DeviceStatement


class WorkerIdentity(msgspec.Struct, frozen=True):
    """A `WorkerIdentity` is the part of the status that does not change in a worker's life; others
    read its state from the tiers that it `lends`; `frees_prompts`: what it computed for them it
    frees once they have it."""

    model: str
    incarnation: int
    sequence_tokens: int
    spec_digest: str = ""
    worker: WorkerId = WorkerId("")
    owns_sessions: bool = False
    lends: tuple[Tier, ...] = ()
    frees_prompts: bool = False

    @property
    def unit(self) -> RoutingUnit:
        """`unit` is the worker in this life, as answers name it."""
        return RoutingUnit(self.worker, 0, Incarnation(self.incarnation))


def pool_uses(cache: HeteroCache) -> dict[str, SlotUse]:
    """Return the use of every pool by component name, and of the state blocks. O(components)."""
    levels = cache.occupancy
    blocks = SlotUse(levels.blocks.capacity, levels.blocks.free)
    uses = dict.fromkeys(cache.layout.range_names, blocks)
    for pool in (*levels.points, levels.states):
        uses[pool.name] = SlotUse(pool.capacity, pool.free)
    return uses


def slot_bytes(cache: HeteroCache) -> dict[str, int]:
    """Return the bytes that one slot of each pool occupies, by pool name."""
    sizes = {component.name: component.slot_bytes for component in cache.layout.components}
    return {**sizes, cache.occupancy.states.name: cache.layout.state_bytes}


class LoadShares(msgspec.Struct, frozen=True):
    """`LoadShares` are the parts of a worker's time that it states with its load: what refilling
    the device would take, and what its engine computed lately."""

    refill: tuple[RefillShare, ...]
    busy: float


def worker_load(
    identity: WorkerIdentity,
    cache: HeteroCache,
    *,
    load: SchedulerLoad,
    shares: LoadShares,
    as_of_s: float,
) -> WorkerLoad:
    """Return the load that answers are stamped with. Bytes are those of range blocks: they are what
    runs short."""
    blocks = cache.occupancy.blocks
    block_bytes = _slot_bytes(cache.layout, Coverage.RANGE)
    return WorkerLoad(
        unit=identity.unit,
        as_of=as_of_s,
        pending_prefill_tokens=load.pending_prefill_tokens,
        running_sequences=load.running,
        waiting_sequences=load.waiting,
        kv_bytes_free=blocks.free * block_bytes,
        kv_bytes_total=cache.occupancy.most_blocks * block_bytes,
        kv_bytes_evictable=cache.occupancy.evictable_blocks() * block_bytes,
        refill_shares=shares.refill,
        busy_share=shares.busy,
    )


def worker_profile(
    identity: WorkerIdentity, layout: Layout, *, costs: CostModel, tiers: Mapping[Tier, int | None]
) -> ProfileStatement:
    """Return what the worker is, at the speed that was measured until now. State from a tier comes
    with its points, so nothing is replayed after a load."""
    return ProfileStatement(
        models=(identity.model,),
        actions=actions_of(tiers),
        spec_digest=identity.spec_digest,
        kv_bytes_per_token=_slot_bytes(layout, Coverage.RANGE) / layout.block_tokens,
        kv_bytes_per_sequence=float(_slot_bytes(layout, Coverage.POINT)),
        speed=speed_statement(costs, replay_tokens=0),
        tiers=tuple(tier_statements(costs, tiers)),
        sequence_tokens=identity.sequence_tokens,
        owns_sessions=identity.owns_sessions,
        lends=tuple(map(str, identity.lends)),
        frees_prompts=identity.frees_prompts,
    )


def worker_status(
    load: WorkerLoad, profile: ProfileStatement, cache: HeteroCache, *, steps: int
) -> HfStatus:
    """Return the whole record of the worker."""
    uses = pool_uses(cache)
    return HfStatus(
        unit=unit_statement(load.unit),
        load=load_statement(load),
        profile=profile,
        device=DeviceStatement(
            block_tokens=cache.layout.block_tokens,
            sessions=len(cache.sessions),
            slots={name: use.capacity for name, use in uses.items()},
            free_slots={name: use.free for name, use in uses.items()},
            slot_bytes=slot_bytes(cache),
            evictable_blocks=cache.occupancy.evictable_blocks(),
            eviction=cache.policy.name,
            steps=steps,
        ),
    )


def _slot_bytes(layout: Layout, coverage: Coverage) -> int:
    """Return the bytes that one slot of every component of this coverage occupies together."""
    return sum(one.slot_bytes for one in layout.components if one.coverage is coverage)
