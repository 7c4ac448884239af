"""What a session's last turn left, and what is said to have come of a prompt."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode, execution_mode, lost_tokens
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.node.vocabulary.chains import (
    MARKED_SESSIONS,
    MARKS_KEPT,
    Chains,
    KnownSessions,
    Plain,
)

A, B = SessionId("a"), SessionId("b")
M = ExecutionMode


@pytest.mark.parametrize(
    ("known", "cached", "brought", "mode"),
    [
        (0, 0, 0, M.COLD_PREFILL),
        (0, 96, 0, M.SEED),
        (0, 512, 512, M.FETCH),
        (1304, 1304, 0, M.DIRECT_APPEND),
        (1304, 2000, 0, M.DIRECT_APPEND),
        (1304, 96, 0, M.RESEED),
        (1304, 0, 0, M.RESEED),
        (1304, 1303, 0, M.RESEED),
        (1304, 1304, 1208, M.FETCH),
        (1304, 1200, 1104, M.FETCH),
        (1304, 400, 304, M.RESEED),
    ],
)
def test_the_mode_of_a_turn(known: int, cached: int, brought: int, mode: M) -> None:
    assert execution_mode(known, cached, brought) is mode


@given(*[st.integers(0, 5000)] * 2)
def test_a_loss_without_a_load_is_a_reseed_and_nothing_else_is(known: int, cached: int) -> None:
    lost = lost_tokens(known, cached)
    assert (execution_mode(known, cached, 0) is M.RESEED) == (lost > 0)


def plain(tokens: Iterable[int]) -> Plain:
    return Plain(pack(tokens))


def test_an_append_knows_all_full_blocks_of_the_last_turn() -> None:
    known = KnownSessions(16)
    known.left(A, plain(range(100)), prompt_tokens=70)
    assert known.tokens_of(A, plain(range(200))) == 96
    assert known.tokens_of(A, plain(range(96))) == 80  # the last token is computed in any case
    assert known.tokens_of(A, plain([*range(70), *range(500, 600)])) == 64
    assert known.tokens_of(A, plain([*range(50), *range(500, 600)])) == 0
    assert known.tokens_of(B, plain(range(200))) == 0
    known.forget(A)
    assert known.tokens_of(A, plain(range(200))) == 0


def test_turns_may_be_taken_back_but_not_edited() -> None:
    known = KnownSessions(16)
    for turn in range(1, 4):
        known.left(A, plain(range(turn * 160)), prompt_tokens=turn * 160 - 48)
    retried = plain([*range(160), *range(900, 950)])
    assert known.tokens_of(A, retried) == 160
    known.left(A, retried, prompt_tokens=200)
    assert known.tokens_of(A, plain(range(480))) == 160  # what came after it is not the session's


def test_a_bounded_number_of_sessions_and_marks_is_kept() -> None:
    known = KnownSessions(1)
    for turn in range(1, 3 * MARKS_KEPT):
        known.left(A, plain(range(2 * turn)), prompt_tokens=2 * turn - 1)
    assert known.tokens_of(A, plain(range(2))) == 0
    for number in range(MARKED_SESSIONS):
        known.left(SessionId(str(number)), plain([1, 2]), prompt_tokens=1)
    assert known.tokens_of(A, plain(range(1000))) == 0


def test_an_edited_history_has_digests_of_its_own() -> None:
    chains, session = Chains(16, block_bytes=64), SessionId("s")
    told, edited = pack(range(64)), pack([*range(20), 7, *range(21, 64)])
    assert chains.digests(told, session) == hash_prefix(told, 16)
    assert chains.digests(edited, session) == hash_prefix(edited, 16)
    assert chains.digests(edited, session) != hash_prefix(told, 16)
