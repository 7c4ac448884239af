"""A turn's life through the facade, and seed 001's scenarios (its 5.1 and 5.2)."""

from __future__ import annotations

import pytest

from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import (
    Begun,
    CacheRefusal,
    CacheRefused,
    NoRoom,
    Replay,
    RestorablePoint,
    Restore,
    Turn,
)
from ownerserve.cache.policies.lru import Lru
from ownerserve.cache.tree.prefix_tree import Freed
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import SessionId, TurnId
from tests.support.cache.cache_driver import BLOCK_BYTES, DENSE, HYBRID, B, Driver, blocks_of

A = SessionId("a")


def test_the_next_turn_goes_on_at_the_end_of_the_output() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, tail=5), blocks_of(4, 5), session="a")
    # 3 blocks + 5 tokens of prompt, 32 of output: five blocks full, the sixth unfinished
    again = driver.turn("2", blocks_of(1, 2, 3, tail=5) + blocks_of(4, 5, 6), session="a")
    assert again.restored == 5 * B


def test_a_prompt_seen_whole_still_computes_its_last_token() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3))
    assert driver.check_match(blocks_of(1, 2, 3)).range_tokens == 3 * B
    assert driver.turn("2", blocks_of(1, 2, 3)).restored == 2 * B
    assert driver.turn("3", blocks_of(1, 2, 3, tail=1)).restored == 3 * B


def test_a_branch_without_point_state_is_reported_with_its_lack() -> None:
    """The V4 case: global KV is all there, window state is not; a planner may replay."""
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, 4, 5, 6))
    found = driver.check_match(blocks_of(1, 2, 3, 7))
    assert found.range_tokens == 3 * B
    assert found.points == (RestorablePoint(3 * B, ("swa", "overlap")),)
    assert driver.turn("2", blocks_of(1, 2, 3, 7)).restored == 0


def test_a_replay_keeps_range_state_and_writes_only_behind_the_floor() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, 4, 5))
    private = driver.cache.occupancy.blocks.used
    begun = driver.begin("2", blocks_of(1, 2, 3, 7), resume=Replay(start=0, floor=3 * B))
    assert isinstance(begun, Begun)
    assert (begun.restored, begun.write_floor) == (0, 3 * B)
    assert driver.prefill("2")
    assert driver.cache.occupancy.blocks.used == private + 1, "only the new block took a slot"
    driver.finish("2")
    assert driver.check_match(blocks_of(1, 2, 3, 7, 8)).range_tokens == 4 * B


@pytest.mark.parametrize("computed", [0, 5, B, 2 * B - 1, 2 * B, 3 * B, 3 * B + 4])
def test_a_turn_that_ends_inside_its_replay_leaves_just_what_it_computed(computed: int) -> None:
    """Its session stands where the turn stopped: what the tree has behind that is not its own, and
    the next turn's tokens follow what was computed. The driver compares all that a turn gets with
    what its client sent."""
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, 4, 5))
    prompt = blocks_of(1, 2, 3, 7)
    driver.begin("2", prompt, session="a", resume=Replay(start=0, floor=3 * B))
    if computed:
        assert driver.compute(TurnId("2"), prompt[: computed * 4])
    done = driver.finish("2")
    assert (done.tokens, done.sealed) == (computed, computed // B * B)
    suffix = blocks_of(8, tail=3)
    begun = driver.append("3", "a", suffix)
    assert isinstance(begun, Begun), begun
    assert begun.pending == (prompt[: computed * 4] + suffix)[begun.restored * 4 :]
    assert driver.prefill("3")
    driver.finish("3")
    said = prompt[: computed * 4] + suffix
    assert driver.check_match(said).range_tokens == len(said) // 4 // B * B
    assert driver.turn("4", said + blocks_of(6), session="a").restored == len(said) // 4 // B * B


def test_restore_at_a_point_that_has_gone_is_refused_and_changes_nothing() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3, 4))
    gone = driver.begin("2", blocks_of(1, 2, 3, 4, 5), resume=Restore(2 * B))
    assert gone == CacheRefused(CacheRefusal.POINT_GONE)
    there = driver.begin("2", blocks_of(1, 2, 3, 4, 5), resume=Restore(3 * B))
    assert isinstance(there, Begun) and there.restored == 3 * B


def test_a_resume_that_the_tree_can_not_give_is_refused() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, tail=1))
    driver.turn("2", blocks_of(1, 2, 3, 4, tail=1))
    # points at 2 and 4 blocks; none at 3, nothing behind 4
    for resume in (Restore(3 * B), Restore(5 * B), Replay(B, 5 * B), Replay(3 * B, 2 * B)):
        prompt = blocks_of(1, 2, 3, 4, 5, 6)
        assert driver.begin("3", prompt, resume=resume) == CacheRefused(CacheRefusal.POINT_GONE), (
            resume
        )
    begun = driver.begin("3", blocks_of(1, 2, 3, 4, 5, 6), resume=Restore(2 * B))
    assert isinstance(begun, Begun) and begun.restored == 2 * B


def test_a_turn_given_up_before_it_computed_is_not_counted() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3), session="a")
    driver.evict(3)
    before = snapshot(driver.cache, 0.0).counters
    driver.begin("2", blocks_of(1, 2, 3, 4), session="a")
    assert driver.cache.counters.reprefilled_tokens == 3 * B
    driver.abort("2")
    assert driver.cache.counters == before


def test_blocks_are_matchable_as_soon_as_they_are_full() -> None:
    driver = Driver(DENSE)
    assert isinstance(driver.begin("1", blocks_of(1, 2, 3)), Begun)
    driver.prefill("1", upto=2 * B)
    second = driver.begin("2", blocks_of(1, 2, 4))
    assert isinstance(second, Begun) and second.restored == 2 * B


def test_two_turns_that_compute_the_same_keep_one_copy() -> None:
    driver = Driver()
    for name in "12":
        driver.begin(name, blocks_of(1, 2, 3))
    driver.prefill("1")
    driver.prefill("2")
    assert driver.cache.occupancy.blocks.used == 3
    assert driver.cache.counters.duplicate_blocks == 3
    driver.finish("1")
    driver.finish("2")


def test_a_fork_copies_only_the_unfinished_block() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2, tail=3))
    driver.prefill("1")
    assert driver.fork("1", "2")
    assert driver.cache.occupancy.blocks.used == 4
    driver.decode("1", blocks_of(5))
    driver.decode("2", blocks_of(6))
    assert driver.cache.occupancy.blocks.used == 2 + 2 * 2
    driver.finish("1")
    driver.finish("2")
    driver.check_match(blocks_of(1, 2, tail=3) + blocks_of(6))


def test_decode_keeps_only_its_last_snapshot() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, tail=1), blocks_of(2, 3, 4, 5))
    positions = [p.position for p in driver.check_match(blocks_of(1, tail=1)).points]
    assert positions == [B]
    tokens = blocks_of(1, tail=1) + blocks_of(2, 3, 4, 5, 6)
    assert [p.position for p in driver.check_match(tokens).points] == [5 * B, B]


def test_no_room_is_all_or_nothing() -> None:
    driver = Driver(DENSE, blocks=8)
    driver.turn("1", blocks_of(1, 2, 3))
    driver.begin("2", blocks_of(4, 5, 6, 7, 8, 9))
    driver.prefill("2")
    driver.begin("3", blocks_of(1, 2, 3, 4))
    got = driver.cache.reserve(TurnId("3"), 4 * B, 0.0)
    # block 3 of the first conversation went for the second's sixth; 8 = 2 locked + 6 private
    assert got == NoRoom("range", 2)
    assert driver.cache.counters.evicted_tokens == B, "the second turn's only"
    driver.check()


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    driver = Driver(DENSE, blocks=2)
    assert driver.begin("1", blocks_of(1, 2, 3)) == CacheRefused(CacheRefusal.TOO_LONG)


@pytest.mark.parametrize("tokens", [b"", b"\0\0\0"])
def test_bad_tokens_name_the_field(tokens: bytes) -> None:
    cache = HeteroCache(HYBRID, dict.fromkeys(("main", "index", "swa", "overlap"), 4), 1)
    with pytest.raises(InvalidInput, match="tokens"):
        cache.begin(Turn(TurnId("1"), None, tokens), 0.0)


def test_advancing_something_else_than_the_prompt_is_an_error() -> None:
    driver = Driver()
    driver.begin("1", blocks_of(1, 2))
    driver.cache.reserve(TurnId("1"), B, 0.0)
    with pytest.raises(InvalidInput, match="differ from the prompt"):
        driver.cache.advance(TurnId("1"), blocks_of(3), 0.0)
    with pytest.raises(InvalidInput, match="reserve"):
        driver.cache.advance(TurnId("1"), blocks_of(1, 2), 0.0)


def test_pools_that_disagree_are_refused_with_the_mend() -> None:
    with pytest.raises(InvalidInput, match="lock-step"):
        HeteroCache(HYBRID, {"main": 4, "index": 5, "swa": 1, "overlap": 1}, 1)
    with pytest.raises(InvalidInput, match="name each of"):
        HeteroCache(HYBRID, {"main": 4}, 1)


# -- seed 001, 5.1 and 5.2 ---------------------------------------------------------------------


def test_release_frees_nothing_by_itself() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3), session="a")
    used = driver.cache.occupancy.blocks.used
    driver.cache.sessions.release(A)
    driver.check()
    assert driver.cache.occupancy.blocks.used == used
    assert driver.cache.occupancy.evictable_blocks() == used


def test_every_finish_inserts_its_output() -> None:
    driver = Driver()
    tokens = blocks_of(1)
    for number in range(2, 6):
        driver.turn(str(number), tokens, blocks_of(number), session="a")
        tokens += blocks_of(number)
        assert driver.check_match(tokens).range_tokens == len(tokens) // 4


def test_a_match_does_not_ask_the_session_table() -> None:
    """I1: clear the table, the answer is the same."""
    driver = Driver()
    tokens = blocks_of(1, 2, 3, 4)
    driver.turn("1", tokens, session="a")
    before = driver.check_match(tokens)
    driver.cache.sessions.release(A)
    assert driver.check_match(tokens) == before
    assert driver.turn("2", tokens, session="a").restored == 3 * B


def test_a_chunked_prefill_can_be_retried() -> None:
    """I3: abort and begin again; what was sealed is matched, nothing is counted twice."""
    driver = Driver()
    driver.begin("1", blocks_of(1, 2, 3, 4), session="a")
    driver.prefill("1", upto=2 * B)
    assert driver.begin("1", blocks_of(1, 2, 3, 4)) == CacheRefused(CacheRefusal.TURN_IS_LIVE)
    driver.abort("1")
    again = driver.begin("1", blocks_of(1, 2, 3, 4), session="a")
    assert isinstance(again, Begun) and again.restored == 2 * B
    driver.prefill("1")
    assert driver.finish("1").version == 1


def test_pressure_trims_blocks_and_no_session_goes_at_once() -> None:
    driver = Driver(DENSE, blocks=30, policy=Lru())
    for number, name in enumerate("abc"):
        driver.now = float(number)
        driver.turn(name, blocks_of(number, *range(10, 19)), session=name)
    driver.evict(1)
    sessions = driver.cache.sessions
    known = [sessions.status(session.session_id) for session in sessions]
    statuses = {s.session_id: s.resident_tokens for s in known if s is not None}
    assert statuses == {"a": 9 * B, "b": 10 * B, "c": 10 * B}
    assert driver.cache.counters.largest_eviction_tokens == B


def test_window_state_can_go_while_compressed_state_stays() -> None:
    driver = Driver(points=2)
    driver.turn("1", blocks_of(1, 2, tail=1), session="a")
    driver.turn("2", blocks_of(3, 4, tail=1), session="b")
    driver.turn("3", blocks_of(5, 6, tail=1), session="c")
    levels = snapshot(driver.cache, 0.0)
    assert levels.cached_tokens["main"] == 6 * B
    assert levels.restorable_points == 2
    assert levels.counters.points_lost["point_evicted"] > 0
    found = driver.check_match(blocks_of(1, 2, 3))
    assert found.range_tokens == 2 * B and found.points[0].lacks


def test_committed_tokens_never_shrink_while_the_turn_runs() -> None:
    """I2, restated: monotone while the lock is held, under the worst pressure."""
    driver = Driver(DENSE, blocks=12)
    driver.begin("1", blocks_of(*range(10)), session="a")
    covered = 0
    for upto in range(B, 11 * B, B):
        driver.prefill("1", upto=upto)
        driver.evict(100)
        sealed = parts_of(driver.cache).running[TurnId("1")].sealed
        assert sealed >= covered
        covered = sealed
    assert covered == 10
    assert driver.finish("1").sealed == 10 * B


def test_a_lock_receipt_is_single_use() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2))
    tree = parts_of(driver.cache).tree
    node, depth = tree.walk(blocks_of(1, 2), 2)
    receipt = tree.lock(node, depth)
    tree.unlock(receipt)
    with pytest.raises(InvariantViolated, match="invariant 5"):
        tree.unlock(receipt)
    assert len(blocks_of(1)) == BLOCK_BYTES


def test_a_trim_over_several_stops_keeps_their_sessions_and_heat() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, tail=1), session="a")
    driver.turn("2", blocks_of(1, 2, 3, 4, tail=1), session="b")
    tree = parts_of(driver.cache).tree
    node, _ = tree.walk(blocks_of(1, 2, 3, 4), 4)
    freed = Freed([], [])
    uses = max(stop.uses for stop in node.stops)
    tree.trim(node, 3, freed)
    assert (len(freed.blocks), len(freed.points), freed.points_lost) == (3, 2, 2)
    [stop] = node.stops
    assert (stop.depth, stop.refs, sorted(stop.anchors or {})) == (1, 2, ["a", "b"])
    assert stop.uses == uses
    assert all(session.stop is stop for session in driver.cache.sessions)


def test_a_turn_without_a_session_leaves_no_trace_of_one() -> None:
    """I4: the same calls, and no session table entry."""
    driver = Driver()
    driver.turn("1", blocks_of(1, 2))
    assert len(driver.cache.sessions) == 0
    assert driver.finished == {}
