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
        self.play = Play(ModelPool(20), pool_fraction=0.5)

    @rule(session=st.sampled_from("abcde"), length=st.integers(0, 12))
    def start(self, session: str, length: int) -> None:
        free = len(self.play.free())
        waits = self.play.start(session, tokens_of(session, length)) is None
        assert not waits or free < 3 + length, "who fits is never kept waiting by a wish"

    @precondition(lambda self: self.play.running)
    @rule(data=st.data(), ends_well=st.booleans())
    def end(self, data: st.DataObject, ends_well: bool) -> None:
        at = data.draw(st.integers(0, len(self.play.running) - 1))
        (self.play.finish if ends_well else self.play.abort)(at)

    @rule(seconds=st.floats(0, TTL_S))
    def time_passes(self, seconds: float) -> None:
        self.play.now += seconds
        self.play.soft.make_room(0, self.play.now)

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
    play.soft.make_room(0, play.now)
    assert play.soft.status().blocks == 5
    play.now += 1
    play.soft.make_room(0, play.now)
    assert play.soft.status().blocks == 0
    assert play.soft.status().expired == 5


def test_no_more_than_the_fraction_is_kept() -> None:
    play = Play(ModelPool(21), pool_fraction=0.5)
    for name in "abc":
        play.start(name, [(name, n) for n in range(6)])
        play.finish(0)
    status = play.soft.status()
    assert (status.blocks, status.sessions, status.over_limit) == (10, 2, 8)


def test_blocks_taken_behind_its_back_are_noticed() -> None:
    play = Play(ModelPool(21), pool_fraction=1.0)
    play.start("a", tokens_of("a", 5))
    play.finish(0)
    taken = play.pool.take(20)  # without make_room: a step that took more than was foreseen
    play.pool.free_blocks(taken)
    status = play.soft.status()
    assert (status.blocks, status.lost) == (0, 8)


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
