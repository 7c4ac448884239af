"""Rules say in one table which kind of state belongs to whom (seed 000, B2).

    kind         authority         who else may hold it             when it is gone
    dense        session's owner   read-only replicas               load, prefill
    compressed   artifact's owner  any worker (with its indexer)    load, prefill
    checkpoint   session's owner   a disk or the remote tier        load, replay, prefill
    tail         session's owner   nobody; it is never published    recompute, hand-over

Kinds are bits: a location says which of them it holds.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TypeAlias

from ownerserve.kv.specs import Role


class TierCode(IntEnum):
    """A tier code is a `Tier` by its number in the directory's messages and records: those where
    copies are kept.

    What is in a volatile tier dies with its holder's incarnation.
    """

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3  # shared: belongs to no worker


class StateKind(IntFlag):
    """A state kind is a kind of state, by the rule of who owns it."""

    DENSE = 1
    COMPRESSED = 2
    CHECKPOINT = 4
    TAIL = 8


Kinds: TypeAlias = int
"""Several `StateKind`s as bits: a plain integer, for there are as many as there are extents."""


MAIN_KINDS: Kinds = int(StateKind.DENSE | StateKind.COMPRESSED)
"""Kinds that every worker that has computed a prefix holds of it, whatever the model."""


Tiers: TypeAlias = frozenset[TierCode]
EVERYWHERE: Tiers = frozenset(TierCode)
AT_REST: Tiers = frozenset((TierCode.DISK, TierCode.REMOTE))
NOWHERE: Tiers = frozenset()


REPLICA_TIERS: dict[StateKind, Tiers] = {
    StateKind.DENSE: EVERYWHERE,
    StateKind.COMPRESSED: EVERYWHERE,
    StateKind.CHECKPOINT: AT_REST,
    StateKind.TAIL: NOWHERE,
}
"""Tiers in which a unit that is not the authority may hold a copy, by kind."""

_KIND_OF_ROLE = {
    Role.DENSE: StateKind.DENSE,
    Role.MLA_LATENT: StateKind.DENSE,
    Role.INDEX: StateKind.COMPRESSED,
    Role.CSA_MAIN: StateKind.COMPRESSED,
    Role.CSA_INDEX: StateKind.COMPRESSED,
    Role.HCA: StateKind.COMPRESSED,
    Role.SWA: StateKind.CHECKPOINT,
    Role.RECURRENT: StateKind.CHECKPOINT,
    Role.CONV: StateKind.CHECKPOINT,
    Role.CSA_TAIL: StateKind.TAIL,
    Role.CSA_INDEX_TAIL: StateKind.TAIL,
    Role.HCA_TAIL: StateKind.TAIL,
}


def kind_of(role: Role) -> StateKind:
    """Return the kind of state that a component of that role is."""
    return _KIND_OF_ROLE[role]


def as_replica(kinds: Kinds, tier: TierCode) -> Kinds:
    """Return the part of `kinds` that a unit that is not their authority may hold in `tier`."""
    return sum(kind for kind, tiers in REPLICA_TIERS.items() if kind & kinds and tier in tiers)
