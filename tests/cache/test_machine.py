"""The same operations as test_schedules, drawn by Hypothesis, which shrinks what it breaks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.cache.cache_play import Pick, Play
from tests.support.examples import examples


def drawn(data: st.DataObject) -> Pick:
    return lambda count: data.draw(st.integers(0, count - 1))


class CacheMachine(RuleBasedStateMachine):
    """Tree + pools + sessions against the brute-force oracle, checked after every step."""

    play: Play

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.play = Play(drawn(data))

    @rule(data=st.data(), name=st.sampled_from(Play.OPERATIONS))
    def step(self, data: st.DataObject, name: str) -> None:
        self.play.pick = drawn(data)
        self.play.do(name)

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.pick = lambda count: 0
            self.play.wind_up()


CacheMachine.TestCase.settings = settings(
    max_examples=examples(20),
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCacheMachine = CacheMachine.TestCase
