"""Which kind of state belongs to whom (seed 000, B2), as one table.

    kind         authority         who else may hold it             when it is gone
    dense        session's owner   read-only replicas               load, prefill
    compressed   artifact's owner  any worker (with its indexer)    load, prefill
    checkpoint   session's owner   a disk or the remote tier        load, replay, prefill
    tail         session's owner   nobody; it is never published    recompute, hand-over

Kinds are bits: a location says which of them it holds.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, StrEnum
from typing import TypeAlias

import msgspec

from ownerserve.kv.messages import RestoreAction, RoutingUnit
from ownerserve.kv.specs import Role


class Tier(IntEnum):
    """Where a holder keeps it. What is volatile dies with the holder's incarnation."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3  # shared: belongs to no worker


class Kind(IntFlag):
    """State by its owner rule."""

    DENSE = 1
    COMPRESSED = 2
    CHECKPOINT = 4
    TAIL = 8


Kinds: TypeAlias = int
"""Bits of `Kind`: a plain integer, for there are as many as there are extents."""


MAIN_KINDS: Kinds = int(Kind.DENSE | Kind.COMPRESSED)
"""What every worker that has computed a prefix holds of it, whatever the model."""


class Authority(StrEnum):
    """Whose word counts."""

    SESSION_OWNER = "session_owner"
    ARTIFACT_OWNER = "artifact_owner"


Tiers: TypeAlias = frozenset[Tier]
EVERYWHERE: Tiers = frozenset(Tier)
AT_REST: Tiers = frozenset((Tier.DISK, Tier.REMOTE))
NOWHERE: Tiers = frozenset()


class OwnerRule(msgspec.Struct, frozen=True):
    """`replica_tiers`: where someone other than the authority may hold a copy."""

    authority: Authority
    replica_tiers: Tiers
    recovery: tuple[RestoreAction, ...]


RULES: dict[Kind, OwnerRule] = {
    Kind.DENSE: OwnerRule(
        Authority.SESSION_OWNER, EVERYWHERE, (RestoreAction.LOAD_GLOBAL, RestoreAction.PREFILL)
    ),
    Kind.COMPRESSED: OwnerRule(
        Authority.ARTIFACT_OWNER, EVERYWHERE, (RestoreAction.LOAD_GLOBAL, RestoreAction.PREFILL)
    ),
    Kind.CHECKPOINT: OwnerRule(
        Authority.SESSION_OWNER,
        AT_REST,
        (RestoreAction.LOAD_POINT, RestoreAction.REPLAY, RestoreAction.PREFILL),
    ),
    Kind.TAIL: OwnerRule(
        Authority.SESSION_OWNER,
        NOWHERE,
        (RestoreAction.RECOMPUTE_TAIL, RestoreAction.LOAD_POINT),
    ),
}

_KIND_OF_ROLE = {
    Role.DENSE: Kind.DENSE,
    Role.MLA_LATENT: Kind.DENSE,
    Role.INDEX: Kind.COMPRESSED,
    Role.CSA_MAIN: Kind.COMPRESSED,
    Role.CSA_INDEX: Kind.COMPRESSED,
    Role.HCA: Kind.COMPRESSED,
    Role.SWA: Kind.CHECKPOINT,
    Role.RECURRENT: Kind.CHECKPOINT,
    Role.CONV: Kind.CHECKPOINT,
    Role.CSA_TAIL: Kind.TAIL,
    Role.CSA_INDEX_TAIL: Kind.TAIL,
    Role.HCA_TAIL: Kind.TAIL,
}


def kind_of(role: Role) -> Kind:
    """The owner rule's kind of a component."""
    return _KIND_OF_ROLE[role]


def may_replicate(kinds: Kinds, tier: Tier) -> bool:
    """May a copy of all these kinds stand in `tier` of one who is not their authority?"""
    return all(tier in rule.replica_tiers for kind, rule in RULES.items() if kind & kinds)


def authority_of(
    kind: Kind, *, session_owner: RoutingUnit | None, artifact_owner: RoutingUnit | None
) -> RoutingUnit | None:
    """Who answers for this kind of state. Dense KV falls to the artifact's owner when the session
    has none: nobody else then keeps its last copy."""
    if RULES[kind].authority is Authority.ARTIFACT_OWNER:
        return artifact_owner
    return session_owner or (artifact_owner if kind is Kind.DENSE else None)
