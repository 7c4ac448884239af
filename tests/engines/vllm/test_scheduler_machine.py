"""A Hypothesis machine over the connector's scheduler side, between a fake vLLM scheduler and fake
workers that answer late, in part, badly or for another step.

Whatever comes: no step reads a row that is not its tokens', no record holds what its name does not
say, no block is given up that is being copied, nothing counts that not all ranks have said, and all
is given back in the end.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.vllm_parts.fake_vllm.play import Play
from tests.support.vllm_parts.fake_vllm.side import SHAPES, Setup

pytestmark = pytest.mark.engine

SALTS = [None, "a", "b"]
SESSIONS = [None, "5" * 32, "6" * 32]
REASONS = ["", "", "corrupt", "absent"]


class Requests(RuleBasedStateMachine):
    """Requests of a few texts, over one engine core."""

    play: Play

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        ranks=st.integers(1, 2),
        checkpoints=st.sampled_from(["turn-end", "full", "branches"]),
        copies=st.sampled_from([1, 2, 100]),
        drafts=st.sampled_from([0, 2]),
        ahead=st.booleans(),
        hashed_at_once=st.sampled_from([8, 100]),
    )
    def start(
        self,
        shape: str,
        ranks: int,
        checkpoints: str,
        copies: int,
        drafts: int,
        ahead: bool,
        hashed_at_once: int,
    ) -> None:
        setup = Setup(shape, ranks, checkpoints, copies, hashed_at_once=hashed_at_once)
        self.play = Play(setup, drafts=drafts, ahead=ahead)

    @rule(
        stem=st.integers(0, 1),
        shared=st.integers(1, 30),
        own=st.integers(0, 6),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(SALTS),
        session=st.sampled_from(SESSIONS),
    )
    def arrive(
        self, stem: int, shared: int, own: int, max_tokens: int, salt: str | None, session: str
    ) -> None:
        number = len(self.play.requests)
        prompt = [*range(stem * 1000, stem * 1000 + shared), *[5000 + number] * own]
        self.play.arrive(prompt, max_tokens=max_tokens, cache_salt=salt, session_id=session)

    @rule(which=st.integers(0, 20), own=st.integers(1, 9), max_tokens=st.integers(1, 9))
    def go_on(self, which: int, own: int, max_tokens: int) -> None:
        """A session's next turn: what the last one left, and more."""
        done = [request for request in self.play.requests if request.is_finished()]
        if done:
            last = done[which % len(done)]
            prompt = [*last.all_token_ids, *[6000 + len(self.play.requests)] * own]
            names = {"cache_salt": last.cache_salt, "session_id": last.session_id}
            self.play.arrive(prompt, max_tokens=max_tokens, **names)

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        if here := self.play.here:
            self.play.abort(here[which % len(here)])

    @rule(new_weights=st.booleans())
    def reset_cache(self, new_weights: bool) -> None:
        self.play.reset_cache(new_weights=new_weights)

    @rule()
    def forget_cache(self) -> None:
        self.play.forget_cache()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.end()


class SchedulerMachine(Requests):
    """What becomes of them, in any order."""

    @rule()
    def schedule(self) -> None:
        self.play.schedule()

    @rule(accepted=st.integers(0, 2))
    def answer(self, accepted: int) -> None:
        self.play.answer(accepted)

    @rule(rounds=st.integers(1, 6))
    def run(self, rounds: int) -> None:
        self.play.run(rounds)

    @rule()
    def look_up(self) -> None:
        self.play.look_up()

    @rule(rank=st.integers(0, 1), which=st.integers(0, 9))
    def copy(self, rank: int, which: int) -> None:
        self.play.copy(rank, which)

    @rule(rank=st.integers(0, 1), which=st.integers(0, 9), keeps=st.booleans())
    def settle(self, rank: int, which: int, keeps: bool) -> None:
        self.play.settle(rank, which, keeps=keeps)

    @rule(rank=st.integers(0, 1), which=st.integers(0, 3), reason=st.sampled_from(REASONS))
    def bring(self, rank: int, which: int, reason: str) -> None:
        self.play.bring(rank, which, reason)

    @rule(which=st.integers(0, 30))
    def forget_stored(self, which: int) -> None:
        self.play.forget_stored(which)

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.play.clock.now += seconds


RANDOM = "OWNERSERVE_RANDOM_LIVES"
"""Set, the machine lives other lives each time, or those of --hypothesis-seed. Else, as in CI, the
same ones: a change fails for what it does, and mutants are judged by equal lives.

    OWNERSERVE_RANDOM_LIVES=1 pytest tests/engines/vllm/test_scheduler_machine.py
"""

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=not os.environ.get(RANDOM),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink one takes many minutes
    suppress_health_check=[HealthCheck.too_slow],
)
