"""The owner rules cover every kind of state that a model keeps."""

from __future__ import annotations

import pytest

from ownerserve.directory.rules import (
    RULES,
    Authority,
    Kind,
    Tier,
    authority_of,
    kind_of,
    may_replicate,
)
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RestoreAction, RoutingUnit
from ownerserve.kv.specs import Role

A, B = (RoutingUnit(WorkerId(name), 0, Incarnation(1)) for name in "ab")


def test_every_role_has_a_rule() -> None:
    assert {kind_of(role) for role in Role} == set(Kind) == set(RULES)


@pytest.mark.parametrize(
    ("kind", "with_session", "without"),
    [(Kind.DENSE, A, B), (Kind.COMPRESSED, B, B), (Kind.CHECKPOINT, A, None), (Kind.TAIL, A, None)],
)
def test_whose_word_counts(
    kind: Kind, with_session: RoutingUnit, without: RoutingUnit | None
) -> None:
    assert authority_of(kind, session_owner=A, artifact_owner=B) == with_session
    assert authority_of(kind, session_owner=None, artifact_owner=B) == without


def test_indexer_keys_go_with_the_compressed_entries() -> None:
    assert kind_of(Role.CSA_INDEX) is kind_of(Role.CSA_MAIN) is Kind.COMPRESSED
    assert RULES[Kind.COMPRESSED].authority is Authority.ARTIFACT_OWNER


def test_where_copies_may_stand() -> None:
    assert all(may_replicate(Kind.DENSE | Kind.COMPRESSED, tier) for tier in Tier)
    assert [tier for tier in Tier if may_replicate(Kind.CHECKPOINT | Kind.DENSE, tier)] == [
        Tier.DISK,
        Tier.REMOTE,
    ]
    assert not any(may_replicate(Kind.TAIL, tier) for tier in Tier)


def test_a_tail_is_recomputed_first() -> None:
    assert RULES[Kind.TAIL].recovery[0] is RestoreAction.RECOMPUTE_TAIL
