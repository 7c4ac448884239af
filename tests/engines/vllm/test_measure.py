"""What vLLM's own steps teach: which of them count, and for how long they took."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ownerserve.engines.vllm.compat import evictable_blocks
from ownerserve.engines.vllm.scheduler_side.measure import ConnectorObserver
from ownerserve.kv.ids import TurnId
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.plan.cost.model import CostModel


def at_once(work: Callable[[], None]) -> None:
    work()


class Play:
    """Measuring of an engine, with what it told last."""

    def __init__(self) -> None:
        self.told: list[CostModel] = []
        self.computed_s: list[float] = []
        self.calibration = Calibration(None)
        self.measuring = ConnectorObserver(
            self.calibration,
            at_once,
            tell=self.told.append,
            tail_tokens=32,
            computed=self.computed_s.append,
        )

    def prompt(self, new: int, prefix: int, *, ms: float, now: float) -> None:
        """A prompt that runs alone, in one step."""
        turn_id, tokens = TurnId("t"), prefix + new
        self.measuring.computing(turn_id, prefix, tokens, prompt=tokens, others=0, now=now)
        self.measuring.reported(now + ms / 1e3)

    @property
    def samples(self) -> float:
        return self.calibration.model.steps().ms(1)


def test_a_step_takes_from_its_schedule_to_its_answer() -> None:
    play = Play()
    for number in range(5):
        play.measuring.scheduled({"a": 1}, now=10.0 + number)
        play.measuring.reported(now=10.004 + number)
    assert play.samples == pytest.approx(4.0)
    assert len(play.told) > 1, "told at the start and once a second"
    told = len(play.told)
    play.measuring.forget(TurnId("a"))
    assert len(play.told) == told + 1, "an engine that idles from now on tells no more"


def test_overlapping_steps_compute_for_as_long_as_one_after_the_other() -> None:
    play = Play()
    play.measuring.scheduled({"a": 100}, now=1.0)
    play.measuring.scheduled({"a": 1}, now=1.1)
    play.measuring.scheduled({}, now=1.2)
    play.measuring.reported(now=1.5)
    play.measuring.reported(now=1.6)
    assert play.computed_s == pytest.approx([0.5, 0.6])
    play.measuring.reported(now=9.0)
    assert len(play.computed_s) == 2, "no step was scheduled"


def test_overlapping_steps_take_from_one_answer_to_the_next() -> None:
    """As with asynchronous scheduling: the next is scheduled before this one's answer."""
    play = Play()
    play.measuring.scheduled({"a": 1}, now=1.000)
    for number in range(1, 20):
        play.measuring.scheduled({"a": 1}, now=1.0 + number * 0.005 - 0.004)
        play.measuring.reported(now=1.0 + number * 0.005)
    assert play.samples == pytest.approx(5.0)


def test_a_step_with_a_prompt_or_drafts_in_it_is_no_decode_step() -> None:
    play = Play()
    before = play.samples
    play.measuring.scheduled({"a": 1, "b": 40}, now=1.0)
    play.measuring.reported(now=9.0)
    play.measuring.scheduled({}, now=9.0)
    assert play.samples == before


def test_tails_say_what_a_pass_costs_that_computes_next_to_nothing() -> None:
    """A first prompt, while all is cold, takes as long as later ones of a thousand tokens: without
    tails it passes for what every pass costs, and no load of a thousand tokens would pay."""
    play = Play()
    play.prompt(64, 0, ms=20.0, now=1.0)
    for number in range(4):
        play.prompt(1025, 0, ms=20.0, now=2.0 + number)
    assert play.calibration.model.prices().prefill.ms(1, 1024) > 15.0
    for number in range(3):
        play.prompt(1, 1024, ms=5.0, now=6.0 + number)
    prefill = play.calibration.model.prices().prefill
    assert prefill.ms(1, 1024) < 6.0
    assert prefill.ms(1025, 0) == pytest.approx(20.0, rel=0.2)


def test_a_tail_is_measured_now_and_then() -> None:
    play = Play()
    for number in range(1000):
        play.prompt(1, 1024, ms=0.5, now=1.0 + number * 1e-3)
    tails = play.calibration.model.prefill(1, 1024).samples
    assert 10 <= tails <= 11
    play.prompt(40, 1024, ms=0.5, now=2.0)
    assert play.calibration.model.prefill(1, 1024).samples == tails + 1


@pytest.mark.parametrize("names", ["cached_block_hash_to_block", "cached_block_hashes_by_block"])
@pytest.mark.parametrize(
    ("blocks", "free", "cached", "evictable"),
    [(101, 100, 0, 0), (101, 60, 70, 30), (101, 0, 90, 0)],
)
def test_cached_blocks_that_nobody_uses_may_go(
    names: str, blocks: int, free: int, cached: int, evictable: int
) -> None:
    """`blocks` counts vLLM's null block too."""
    held = dict.fromkeys(range(cached))
    pool = SimpleNamespace(num_gpu_blocks=blocks, get_num_free_blocks=lambda: free)
    pool.cached_block_hash_to_block = held
    setattr(pool, names, held)
    assert evictable_blocks(pool) == evictable
