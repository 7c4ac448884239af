"""The owner rules cover every kind of state that a model keeps."""

from __future__ import annotations

from ownerserve.directory.rules import REPLICA_TIERS, StateKind, TierCode, kind_of
from ownerserve.kv.specs import Role


def test_every_role_has_a_rule() -> None:
    assert {kind_of(role) for role in Role} == set(StateKind) == set(REPLICA_TIERS)


def test_indexer_keys_go_with_the_compressed_entries() -> None:
    assert kind_of(Role.CSA_INDEX) is kind_of(Role.CSA_MAIN) is StateKind.COMPRESSED


def test_where_copies_may_stand() -> None:
    assert REPLICA_TIERS[StateKind.DENSE] == REPLICA_TIERS[StateKind.COMPRESSED] == set(TierCode)
    assert REPLICA_TIERS[StateKind.CHECKPOINT] == {TierCode.DISK, TierCode.REMOTE}
    assert not REPLICA_TIERS[StateKind.TAIL]
