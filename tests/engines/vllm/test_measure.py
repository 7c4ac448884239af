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
        self.calibration = Calibration(None)
        self.measuring = ConnectorObserver(self.calibration, at_once, tell=self.told.append)

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
