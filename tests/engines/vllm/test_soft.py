"""Soft references over a pool: idle sessions are evicted last, and nobody ever waits for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.children import importing
from tests.support.vllm_parts.soft_play import (
    TTL_S,
    ModelPool,
    ModelQueue,
    Play,
    play_at_random,
    resume_under_noise,
    tokens_of,
)

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


class SoftMachine(RuleBasedStateMachine):
    """Requests in any order; `Play` checks each step."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(ModelPool(30), pool_fraction=0.7)

    @rule(
        session=st.sampled_from("abcde"),
        length=st.integers(0, 12),
        edited_at=st.one_of(st.none(), st.integers(0, 12)),
    )
    def start(self, session: str, length: int, edited_at: int | None) -> None:
        free = len(self.play.free())
        tokens = tokens_of(session, length, edited_at=edited_at)
        waits = self.play.start(session, tokens) is None
        assert not waits or free < 3 + length, "who fits is never kept waiting by a wish"

    @precondition(lambda self: self.play.running)
    @rule(data=st.data(), ends_well=st.booleans())
    def end(self, data: st.DataObject, ends_well: bool) -> None:
        at = data.draw(st.integers(0, len(self.play.running) - 1))
        (self.play.finish if ends_well else self.play.abort)(at)

    @precondition(lambda self: not self.play.running)
    @rule(names=st.lists(st.sampled_from("abcde"), min_size=2, max_size=4))
    def turns_one_after_another(self, names: list[str]) -> None:
        for name in names:
            if self.play.start(name, tokens_of(name, 3)) is not None:
                self.play.finish(0)
                self.play.check()

    @rule(session=st.sampled_from("abcde"))
    def goes_elsewhere(self, session: str) -> None:
        self.play.release(session)

    @rule(seconds=st.floats(0, TTL_S))
    def time_passes(self, seconds: float) -> None:
        self.play.now += seconds
        self.play.soft.tidy(self.play.now)

    @precondition(lambda self: not self.play.running)
    @rule()
    def cache_is_reset(self) -> None:
        assert self.play.pool.reset()
        self.play.soft.clear()

    @invariant()
    def books_agree(self) -> None:
        self.play.check()


TestSoftMachine = SoftMachine.TestCase
TestSoftMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_a_session_comes_back_after_noise_of_twice_the_pool() -> None:
    assert resume_under_noise(ModelPool(64), softly=True) == 23
    assert resume_under_noise(ModelPool(64), softly=False) == 0


def test_under_overload_tails_go_first_and_from_the_session_that_ended_longest_ago() -> None:
    play = Play(ModelPool(31), pool_fraction=1.0)
    for name in ("old", "new"):
        play.start(name, [(name, n) for n in range(12)])
        play.finish(0)
        play.now += 1
    assert play.start("big", [("big", n) for n in range(14)]) == 0
    play.abort(0)
    assert play.start("new", [("new", n) for n in range(12)]) == 12
    play.finish(0)
    assert play.start("old", [("old", n) for n in range(12)]) == 4


def test_the_session_that_asks_gives_up_its_own_blocks_last() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    for name in ("mine", "other"):
        play.start(name, [(name, n) for n in range(9)])
        play.finish(0)
    assert play.start("mine", [("mine", n) for n in range(15)]) == 9
    play.finish(0)
    assert play.start("other", [("other", n) for n in range(9)]) == 5


def test_a_request_too_large_for_now_takes_nothing_from_anybody() -> None:
    play = Play(ModelPool(21), pool_fraction=0.5)
    play.start("idle", [("idle", n) for n in range(8)])
    play.finish(0)
    play.start("busy", [("busy", n) for n in range(5)])
    assert play.start("huge", [("huge", n) for n in range(18)]) is None
    assert play.soft.status().blocks == 8
    assert play.soft.status().given_up == 0


def test_a_wish_ends_with_its_time_and_not_while_its_session_waits() -> None:
    play = Play(ModelPool(21))
    play.start("a", tokens_of("a", 2))
    play.finish(0)
    play.now = TTL_S - 1
    play.soft.resumed("a", play.now)
    play.now += TTL_S - 1
    play.soft.tidy(play.now)
    assert play.soft.status().blocks == 5
    play.now += 1
    play.soft.tidy(play.now)
    assert play.soft.status().blocks == 0
    assert play.soft.status().expired == 5


def test_no_more_than_the_fraction_is_kept() -> None:
    play = Play(ModelPool(21), pool_fraction=0.5)
    for name in "abc":
        play.start(name, [(name, n) for n in range(6)])
        play.finish(0)
    status = play.soft.status()
    assert (status.blocks, status.sessions, status.over_limit) == (10, 2, 8)


def test_what_vllm_takes_is_wished_for_no_more() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    play.start("a", tokens_of("a", 5))
    play.finish(0)
    play.pool.free_blocks(play.take(20))
    status = play.soft.status()
    assert (status.blocks, status.given_up) == (0, 8)


def test_a_session_that_went_elsewhere_is_taken_before_one_that_is_idle_for_longer() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    for name in "ab":
        play.start(name, [(name, n) for n in range(10)])
        play.finish(0)
    play.soft.released("b")
    assert play.start("noise", [("noise", n) for n in range(4)]) == 0
    play.abort(0)
    assert play.start("a", [("a", n) for n in range(10)]) == 10


def test_a_turn_that_takes_long_counts_from_its_end() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    for _ in range(2):
        play.start("a", [("a", n) for n in range(8)])
        play.start("b", [("b", n) for n in range(8)])
        play.finish(1)
        play.finish(0)
    assert play.start("noise", [("noise", n) for n in range(8)]) == 0
    play.abort(0)
    assert play.start("a", [("a", n) for n in range(8)]) == 8


def test_a_session_that_lost_its_tail_wishes_for_all_of_its_next_turn() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    play.start("a", [("a", n) for n in range(15)])
    play.finish(0)
    assert play.start("noise", [("noise", n) for n in range(12)]) == 0
    play.abort(0)
    assert play.start("a", [("a", n) for n in range(8)]) == 8
    play.finish(0)
    play.check()
    assert play.soft.status().blocks == 8


def test_a_block_that_was_not_cached_at_its_place_is_wished_for_once_it_is() -> None:
    """vLLM takes blocks without content first, so the same one comes back to its place."""
    play = Play(ModelPool(21), pool_fraction=1.0)
    held = play.take(4)
    for at in (0, 1, 3):
        play.pool.fill(held[at], at)
    tables = [[block.block_id for block in held]]
    play.soft.finished("a", tables, play.now)
    play.pool.free_blocks(reversed(held))
    assert play.soft.status().blocks == 3
    play.check()
    play.pool.touch([held[at] for at in (0, 1, 3)])
    assert play.take(1) == [held[2]]
    play.pool.fill(held[2], 2)
    play.soft.finished("a", [list(tables[0])], play.now)
    assert play.soft.status().blocks == 4
    play.pool.free_blocks(reversed(held))
    play.check()


def test_what_several_sessions_share_outlives_each_of_them() -> None:
    play = Play(ModelPool(40), pool_fraction=1.0)
    for name in "abc":
        play.start(name, tokens_of(name, 5))
        play.finish(0)
    for name in "ca":  # the last one that had the shared head in use, and the first
        play.release(name)
        play.check()
    assert play.start("noise", [("noise", n) for n in range(26)]) == 0
    play.abort(0)
    assert play.start("b", tokens_of("b", 5)) == 8
    play.check()


def test_a_pool_whose_queue_does_more_than_ours_has_no_soft_references() -> None:
    class NewQueue(ModelQueue):
        def shuffle(self) -> None: ...

    pool = ModelPool(21)
    pool.free_block_queue = queue = NewQueue(pool.blocks[1:])
    play = Play(pool)
    play.start("a", tokens_of("a", 5))
    play.finish(0)
    assert play.pool.free_block_queue is queue
    assert play.soft.status().blocks == 0
    play.soft.tidy(play.now)
    play.check()


def test_a_walk_goes_on_behind_any_free_block() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    for name in "ab":
        play.start(name, tokens_of(name, 4))
        play.finish(0)
    order = play.pool.free_block_queue
    free = play.free()
    assert len(free) == 20
    assert list(order.iter_blocks_after(None)) == free
    for at, block in enumerate(free):
        assert list(order.iter_blocks_after(block)) == free[at + 1 :]


def test_a_reset_that_nobody_told_of_is_noticed() -> None:
    play = Play(ModelPool(21))
    play.start("a", tokens_of("a", 5))
    play.finish(0)
    assert play.pool.reset()
    play.soft.tidy(play.now)
    assert play.soft.status().blocks == 0
    play.check()


def test_the_model_pool_at_random() -> None:
    for seed in range(10):
        play_at_random(ModelPool(24), seed)


@pytest.mark.vllm
def test_vllms_own_pool_at_random() -> None:
    """The same play over vLLM's BlockPool, which counts references itself."""
    if not VLLM_PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    played = subprocess.run(
        [VLLM_PYTHON, "-m", "tests.support.vllm_parts.soft_play", "20"],
        env=importing(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert played.returncode == 0, played.stderr[-3000:]
    assert played.stdout.split("\n")[-4:-1] == ["with 23", "without 0", "ok"]
