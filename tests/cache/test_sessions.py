"""Sessions: soft references, appends, overlapping turns, late finishes, ids used again."""

from __future__ import annotations

import pytest

from ownerserve.cache.hetero import parts_of
from ownerserve.cache.outcomes import (
    DEFAULT_TTL_S,
    Append,
    Begun,
    CacheRefusal,
    CacheRefused,
    Install,
)
from ownerserve.cache.policies.session_reference import SessionReference
from ownerserve.cache.sessions import FORGET_CHECK_S
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import SessionId, TurnId
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of

A, NOBODY = SessionId("a"), SessionId("nobody")


def test_an_append_needs_only_what_is_new() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, tail=3), blocks_of(4, 5), session="a")
    begun = driver.append("2", "a", blocks_of(6, tail=1))
    assert isinstance(begun, Begun)
    assert begun.restored == 4 * B
    assert len(begun.pending) // 4 == 3 + B + 1
    assert driver.prefill("2") and driver.finish("2").version == 2


def test_an_append_finds_what_others_computed_behind_the_session() -> None:
    driver = Driver(DENSE)
    driver.turn("1", blocks_of(1, 2), session="a")
    driver.turn("2", blocks_of(1, 2, 3, 4))
    begun = driver.append("3", "a", blocks_of(3, 4, tail=1))
    assert isinstance(begun, Begun) and begun.restored == 4 * B


def test_an_append_whose_point_state_went_computes_from_tokens_the_tree_has() -> None:
    driver = Driver(points=1)
    driver.turn("1", blocks_of(1, 2, 3, tail=1), session="a")
    driver.turn("2", blocks_of(7, tail=1), session="b")  # takes the only snapshot
    begun = driver.append("3", "a", blocks_of(4))
    assert isinstance(begun, Begun) and begun.restored == 0
    assert begun.pending == blocks_of(1, 2, 3, tail=1) + blocks_of(4)
    assert driver.prefill("3")


def test_a_point_of_which_one_component_went_is_not_gone_on_from() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, tail=1), session="a")
    assert driver.cache.pressure.evict_points(0, 1) == 1
    begun = driver.begin("2", blocks_of(1, 2, 3, tail=2), session="a")
    assert isinstance(begun, Begun) and begun.restored == 0
    assert driver.prefill("2")


def test_an_append_after_its_blocks_went_must_send_the_whole_prompt() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3), session="a")
    driver.evict(1)
    assert driver.append("2", "a", blocks_of(4)) == CacheRefused(CacheRefusal.POINT_GONE)
    assert isinstance(driver.begin("2", blocks_of(1, 2, 3, 4), session="a"), Begun)


def test_appends_to_unknown_sessions_and_old_versions_are_refused() -> None:
    driver = Driver()
    cache = driver.cache
    call = Append(TurnId("1"), NOBODY, 1, blocks_of(1))
    assert cache.append(call, 0.0) == CacheRefused(CacheRefusal.UNKNOWN_SESSION)
    driver.turn("1", blocks_of(1), session="a")
    driver.turn("2", blocks_of(1, 2), session="a")
    stale = Append(TurnId("3"), A, 1, blocks_of(3))
    assert cache.append(stale, 0.0) == CacheRefused(CacheRefusal.STALE_VERSION)


def test_a_soft_reference_orders_eviction_until_its_ttl() -> None:
    driver = Driver(DENSE, policy=SessionReference())
    driver.begin("1", blocks_of(1, 2), session="a", ttl_s=100.0)
    driver.prefill("1")
    driver.finish("1")
    driver.now = 50.0
    driver.turn("2", blocks_of(3, 4))  # later, but nobody refers to it
    driver.evict(2)
    assert driver.check_match(blocks_of(1, 2)).range_tokens == 2 * B
    driver.turn("3", blocks_of(3, 4))
    driver.now = 101.0
    driver.cache.sessions.expire(driver.now)
    driver.evict(2)
    assert driver.check_match(blocks_of(1, 2)).range_tokens == 0, "the older one, TTL over"


def test_point_state_loses_its_place_with_the_soft_reference() -> None:
    driver = Driver(points=3, policy=SessionReference())
    for number, name in enumerate("abcd"):
        driver.now = float(number)
        driver.turn(name, blocks_of(number, tail=1), session=name)  # d's took the place of a's
    driver.cache.sessions.release(SessionId("c"))
    driver.now = 4.0
    driver.turn("e", blocks_of(4, tail=1), session="e")
    complete = [not driver.check_match(blocks_of(n, 9)).points[0].lacks for n in range(5)]
    assert complete == [False, True, False, True, True], "the released one's, not the older b's"


def test_status_comes_from_the_tree() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, tail=2), session="a")
    status = driver.cache.sessions.status(A)
    assert status is not None
    assert (status.tokens, status.resident_tokens) == (3 * B + 2, 3 * B)
    assert status.restorable_tokens == 3 * B
    assert status.resident_bytes["main"] == 3 * 100 * B
    driver.evict(2)
    status = driver.cache.sessions.status(A)
    assert status is not None
    assert (status.tokens, status.resident_tokens, status.restorable_tokens) == (3 * B + 2, B, 0)
    assert driver.cache.sessions.status(NOBODY) is None
    with pytest.raises(InvalidInput, match="session_id"):
        driver.cache.sessions.release(NOBODY)


def test_of_overlapping_turns_the_one_begun_last_is_the_session() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2), session="a")
    driver.begin("2", blocks_of(1, 3, 4), session="a")
    driver.prefill("1")
    driver.prefill("2")
    assert driver.finish("2").version == 1
    late = driver.finish("1")
    assert late.version is None, "begun before the one that has moved the session"
    status = driver.cache.sessions.status(A)
    assert status is not None and status.tokens == 3 * B
    assert driver.check_match(blocks_of(1, 2, 5)).range_tokens == 2 * B, "its output is kept"


def test_a_turn_that_finishes_after_release_does_not_bring_the_session_back() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2), session="a")
    driver.prefill("1")
    driver.cache.sessions.release(A)
    assert driver.finish("1").version is None
    assert driver.cache.sessions.status(A) is None


def test_a_session_id_used_again_is_another_session() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2), session="a")
    driver.prefill("1")
    driver.cache.sessions.release(A)
    driver.turn("2", blocks_of(5, 6, 7), session="a")
    assert driver.finish("1").version is None
    status = driver.cache.sessions.status(A)
    assert status is not None and (status.version, status.tokens) == (1, 3 * B)


def test_a_turn_id_may_be_used_again_when_its_turn_is_over() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2))
    assert driver.turn("1", blocks_of(1, 2, 3)).restored == 2 * B


def test_an_aborted_turn_does_not_move_the_session() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2), session="a")
    driver.begin("2", blocks_of(1, 2, 3, 4), session="a")
    driver.prefill("2")
    driver.abort("2")
    status = driver.cache.sessions.status(A)
    assert status is not None and (status.version, status.tokens) == (1, 2 * B)
    assert driver.check_match(blocks_of(1, 2, 3, 4, 5)).range_tokens == 4 * B


def test_a_session_of_which_nothing_is_left_is_forgotten() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2), session="a")
    driver.evict(2)
    driver.now = 301.0
    driver.cache.sessions.expire(driver.now)
    assert len(driver.cache.sessions) == 0


def test_an_expired_session_is_remembered_for_a_while_behind_its_last_block() -> None:
    """Nobody looks at it while it is resident; the tree says when it is not."""
    driver = Driver()
    driver.turn("1", blocks_of(1, 2), session="a")
    driver.now = 10_000.0
    driver.cache.sessions.expire(driver.now)
    driver.evict(2)
    driver.cache.sessions.expire(driver.now)
    assert len(driver.cache.sessions) == 1, "it is told from a new one if it comes back now"
    driver.now += FORGET_CHECK_S - 1.0
    driver.cache.sessions.expire(driver.now)
    assert len(driver.cache.sessions) == 1
    driver.now += 1.0
    driver.cache.sessions.expire(driver.now)
    assert len(driver.cache.sessions) == 0


def test_each_turn_puts_its_sessions_end_off() -> None:
    driver = Driver()
    for number in range(5):
        driver.now = 100.0 * number
        driver.turn(str(number), blocks_of(1, 2), session="a")
    driver.cache.sessions.expire(400.0 + DEFAULT_TTL_S - 1.0)
    session = driver.cache.sessions.get(A)
    assert session is not None and session.is_referenced
    driver.cache.sessions.expire(400.0 + DEFAULT_TTL_S)
    assert not session.is_referenced


def test_tokens_computed_again_are_counted() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3), session="a")
    driver.evict(3)
    driver.turn("2", blocks_of(1, 2, 3, 4), session="a")
    counters = driver.cache.counters
    assert counters.reprefilled_tokens == 3 * B


def test_an_agent_that_drops_part_of_each_output_keeps_a_short_path() -> None:
    """Dead tails move out; a plain tree would have a node a turn on the path."""
    driver = Driver(DENSE, blocks=200)
    tokens = blocks_of(1, 2, 3)
    for number in range(12):
        driver.turn(str(number), tokens, blocks_of(7, number % 5), session="a")
        tokens += blocks_of(number % 3, 8)
    node, depth = parts_of(driver.cache).tree.walk(tokens, 100)
    assert depth * B == len(tokens) // 4 - 2 * B
    assert node.parent is parts_of(driver.cache).tree.root


def test_a_version_that_was_counted_elsewhere_goes_on_here() -> None:
    """As after a move: a guest's turn was counted here, the owner's count arrives."""
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, tail=3), session="a")
    assert driver.install("a", 17, blocks_of(1, 2), blocks_of(tail=3))
    begun = driver.append("2", "a", blocks_of(6, tail=1))
    assert isinstance(begun, Begun) and begun.restored == 2 * B
    assert driver.prefill("2") and driver.finish("2").version == 18


def test_a_session_that_never_was_here_stands_at_what_is_resident() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3))
    assert driver.install("a", 4, blocks_of(1, 2, 7, 8))
    assert driver.append("2", "a", blocks_of(6)) == CacheRefused(CacheRefusal.POINT_GONE)
    assert driver.install("a", 5, blocks_of(1, 2, 3))
    assert isinstance(driver.append("3", "a", blocks_of(6)), Begun)


def test_an_installed_session_is_kept_as_one_that_finished_here() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2))
    driver.install("a", 4, blocks_of(1, 2))
    session = driver.cache.sessions.get(A)
    assert session is not None and session.is_referenced and session.stop is not None
    driver.now = DEFAULT_TTL_S
    driver.cache.sessions.expire(driver.now)
    assert not session.is_referenced


def test_a_running_turn_counts_for_itself() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2), session="a")
    assert not driver.install("a", 9, blocks_of(1, 2))
    driver.prefill("1")
    assert driver.finish("1").version == 1


@pytest.mark.parametrize(
    ("version", "tokens", "open_tokens"),
    [
        (0, blocks_of(1), b""),
        (1, blocks_of(1, tail=1), b""),
        (1, blocks_of(1), blocks_of(1)),
        (1, blocks_of(1), b"ab"),
    ],
)
def test_what_no_turn_leaves_is_not_installed(
    version: int, tokens: bytes, open_tokens: bytes
) -> None:
    cache = Driver().cache
    with pytest.raises(InvalidInput, match=r"version|tokens"):
        cache.install(Install(A, version, tokens, open_tokens), 0.0)
    assert len(cache.sessions) == 0


@pytest.mark.parametrize("edited", [blocks_of(1, 7, 3, 9), blocks_of(1, 2, 3, 4)])
def test_an_edited_history_is_no_append_though_it_is_as_long(edited: bytes) -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, tail=2), session="a")
    begun = driver.begin("2", edited, session="a")  # the driver asks whether it is an append
    assert isinstance(begun, Begun) and driver.prefill("2")


def test_a_session_that_goes_over_to_anothers_branch_computes_over_its_blocks() -> None:
    driver = Driver(DENSE)
    driver.turn("1", blocks_of(1, 2, 3, 4), session="a")
    driver.turn("2", blocks_of(1, 2, 7, 8), session="b")
    begun = driver.begin("3", blocks_of(1, 2, 7, 8, 5), session="a")
    assert isinstance(begun, Begun) and begun.restored == 4 * B
    assert driver.prefill("3")


def test_a_lock_is_given_back_once() -> None:
    tree = PrefixTree(len(blocks_of(1)))
    node, depth, _ = tree.extend(tree.root, 0, blocks_of(1, 2), [0, 1])
    mine, anothers = tree.lock(node, depth), tree.lock(node, depth)
    tree.unlock(mine)
    with pytest.raises(InvariantViolated, match="twice"):
        tree.unlock(mine)
    assert tree.protected == 2
    tree.unlock(anothers)
    assert tree.protected == 0
