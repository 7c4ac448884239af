"""These events are what a running node tells the cost model. Service times and waiting times come
apart.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.plan.inputs import Backlog


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A load of `bytes` from `tier` took `ms`, waiting behind other loads not included."""

    tier: Tier
    bytes: int
    ms: float


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """A prefill of `new` tokens after `prefix` others took `ms`."""

    new: int
    prefix: int
    ms: float


class Replayed(msgspec.Struct, frozen=True, tag=True):
    """A replay of `new` tokens after `prefix` others, below the write floor, took `ms`."""

    new: int
    prefix: int
    ms: float


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A step that decoded `batch` sequences, and nothing beside, took `ms`."""

    batch: int
    ms: float


class Waited(msgspec.Struct, frozen=True, tag=True):
    """A request that met `backlog` on arrival started `ms` later."""

    backlog: Backlog
    ms: float


Observation = Loaded | Prefilled | Replayed | Stepped | Waited
