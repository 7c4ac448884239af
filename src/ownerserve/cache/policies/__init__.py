"""Policies are eviction orders, one small file each. All pass tests/cache/test_policies.py."""

from __future__ import annotations

from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.cache.policies.fifo import Fifo
from ownerserve.cache.policies.lfu import Lfu
from ownerserve.cache.policies.lru import Lru
from ownerserve.cache.policies.pinned_slot import PinnedSlot
from ownerserve.cache.policies.priority import Priority
from ownerserve.cache.policies.session_reference import SessionReference
from ownerserve.cache.policies.slru import Slru
from ownerserve.cache.policies.tail_latency import TailLatency

EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        CostAware,
        Fifo,
        Lfu,
        Lru,
        PinnedSlot,
        Priority,
        SessionReference,
        Slru,
        TailLatency,
    )
}
"""Every policy by its name."""

DEFAULT_EVICTION = CostAware.name
SERVED_EVICTIONS = tuple(
    name for name, policy in EVICTION_POLICIES.items() if not policy.pins_idle_sessions
)
"""The policies under which a worker may serve: all but the baseline that can deadlock."""
