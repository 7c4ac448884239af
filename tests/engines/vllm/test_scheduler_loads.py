"""What the connector's scheduler side makes of loads that vLLM places otherwise, ranks fail, or
nobody waits for: scenarios of a fake vLLM scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ownerserve.cache.outcomes import Match, Replay, RestorablePoint
from ownerserve.engines.vllm.replay.replays import ReplayLengths, Replays, ResumeAt
from ownerserve.engines.vllm.scheduler_side.device import EngineDevice
from ownerserve.engines.vllm.scheduler_side.resuming import Resuming
from ownerserve.engines.vllm.scheduler_side.scheduler import HASHED_WITHIN_S
from ownerserve.engines.vllm.turns.prompts import HashedPrompt
from ownerserve.engines.vllm.turns.turn import TrackedRequest
from ownerserve.engines.vllm.worker_commands import Tables
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import HashedPrefix, pack
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState
from ownerserve.plan.restore import Planner
from tests.support.vllm_parts.fake_vllm.play import Play
from tests.support.vllm_parts.fake_vllm.request import BLOCK, FakeRequest
from tests.support.vllm_parts.fake_vllm.scheduler import Hooks
from tests.support.vllm_parts.fake_vllm.side import SHAPES, Setup

pytestmark = pytest.mark.engine

PROMPT = list(range(30))
ROOM = 100
"""Copies for which there is always room."""


def stored(ranks: int = 1) -> Play:
    """An engine core whose ranks have a prompt stored that vLLM has forgotten."""
    play = Play(Setup("dense", ranks, "full", ROOM), drafts=0, ahead=False)
    play.arrive(PROMPT, max_tokens=1)
    play.finish()
    play.forget_cache()
    return play


def loading(ranks: int = 1) -> tuple[Play, FakeRequest]:
    """The same, and a request that waits for its load, which workers have begun."""
    play = stored(ranks)
    request = play.arrive(PROMPT, max_tokens=2)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert all(rank.loading for rank in play.engine.ranks)
    return play, request


def bring(play: Play, *reasons: str) -> None:
    """End the load of each rank, by its reason or well."""
    for rank, reason in enumerate(reasons):
        play.bring(rank, 0, reason)
    play.schedule()
    play.answer(accepted=0)


def loads_of(play: Play) -> tuple[int, int]:
    """How many loads were taken for good, and how many for missed."""
    status = play.engine.side.status()
    return status.get("restore_loaded", 0), status.get("restore_miss", 0)


class Shorter:
    """Hooks between vLLM and ours: it places a block less than it was offered."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def placed(self, request: Any, tables: Tables, tokens: int) -> None:
        self._hooks.placed(request, tables, tokens - BLOCK if tokens else 0)


def test_a_length_that_was_not_offered_is_not_filled_and_the_request_goes_on() -> None:
    play = stored()
    play.scheduler.hooks = Shorter(play.scheduler.hooks)
    play.arrive(PROMPT, max_tokens=2)
    play.finish()
    play.end()
    assert play.engine.side.status()["misplaced"] == 1
    assert (play.seen["good loads"], play.seen["failed loads"]) == (0, 1)


@pytest.mark.parametrize("reasons", [("absent", ""), ("", "absent")])
def test_one_rank_that_failed_a_load_is_enough(reasons: tuple[str, str]) -> None:
    play, _ = loading(ranks=2)
    bring(play, *reasons)
    assert loads_of(play) == (0, 1)
    play.finish()
    play.end()


def test_a_load_that_one_rank_has_not_answered_is_not_over() -> None:
    play, request = loading(ranks=2)
    bring(play, "")
    assert (loads_of(play), play.engine.side.status()["loads"]) == ((0, 0), 1)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    play.bring(1, 0, "")
    play.finish()
    play.end()
    assert loads_of(play) == (1, 0)


def test_other_records_than_were_asked_for_are_no_state_of_the_prompt() -> None:
    play, _ = loading()
    (worker,) = play.engine.ranks
    play.bring(0, 0, "")
    (done,) = worker.report.loads
    assert len(done.ids) > 1
    turned = msgspec.structs.replace(done, ids=done.ids[::-1])
    worker.report = msgspec.structs.replace(worker.report, loads=(turned,))
    play.schedule()
    play.answer(accepted=0)
    assert loads_of(play) == (0, 1)
    play.finish()
    play.end()


@pytest.mark.parametrize("given_up_by", ["switch_off", "reset", "abort"])
def test_workers_are_told_of_loads_that_nobody_waits_for(given_up_by: str) -> None:
    """A rank of the two has ended its part: the other one's is dropped, and ends as a failure."""
    play, request = loading(ranks=2)
    bring(play, "")
    (operation_id,) = play.engine.ranks[1].loading
    if given_up_by == "switch_off":
        play.engine.side.switch_off()
    elif given_up_by == "reset":
        play.engine.reset()
    else:
        play.abort(request)
    play.schedule()
    assert play.scheduler.in_flight[-1].commands.drops == (operation_id,)
    play.answer(accepted=0)
    play.finish()
    play.end()
    assert (play.seen["good loads"], play.seen["failed loads"]) == (0, 1)


# ---- prompts that another thread hashes


def unhashed() -> tuple[Play, FakeRequest]:
    """An engine core, and a request that waits until its prompt is hashed."""
    play = Play(Setup("dense", 1, "full", ROOM, hashed_at_once=8), drafts=0, ahead=False)
    request = play.arrive(PROMPT, max_tokens=9)
    play.schedule()
    play.answer(accepted=0)
    assert request.status.name == "WAITING"
    return play, request


def test_a_prompt_that_is_hashed_too_late_runs_without_us_to_its_end() -> None:
    """Though the hashes come while it runs: of a turn that began without them nothing is kept."""
    play, request = unhashed()
    play.clock.now += HASHED_WITHIN_S
    play.schedule()
    play.answer(accepted=0)
    assert request.num_computed_tokens
    status = play.engine.side.status()
    assert (status["bypassed_hashed_late"], status["turns"]) == (1, 0)
    play.look_up()
    play.finish()
    play.end()
    assert not play.engine.oracle.asked_for


def test_a_prompt_that_is_hashed_in_time_is_looked_for_and_kept() -> None:
    play, _ = unhashed()
    play.clock.now += HASHED_WITHIN_S - 1.0
    play.finish()
    play.end()
    assert "bypassed_hashed_late" not in play.engine.side.status()
    assert play.engine.oracle.told["kept"]


# ---- where full attention has more than windows


def test_where_full_attention_alone_is_cached_windows_are_lacking() -> None:
    device, turn = EngineDevice(SHAPES["windows"].layout()), TurnId("t")
    device.heard(turn, 8, 16)
    lacking = RestorablePoint(16, SHAPES["windows"].layout().point_names)
    assert lacking.lacks
    assert device.match(turn, b"") == Match(16, (lacking, RestorablePoint(8)))


REACH = 8


@pytest.mark.parametrize(
    ("start", "floor", "goes_on_at"),
    [
        (24, 32, ResumeAt(24, 32, 32)),
        (25, 32, None),  # too short: the last rows of the windows would not be right
        (8, 32, None),  # not behind vLLM's own hit: that is as good, and computes no more
        (9, 32, ResumeAt(9, 32, 32)),
    ],
)
def test_a_replay_is_offered_where_it_is_exact_and_behind_the_engines_hit(
    start: int, floor: int, goes_on_at: ResumeAt | None
) -> None:
    model = ModelState(layers=2, block_tokens=BLOCK, range_bytes_per_token=1.0, point_bytes=1)
    replays = Replays(ReplayLengths(REACH, REACH), Planner(model, FULL_ABILITIES), workers=1)
    replays.take_part()
    replays.heard((True,))
    request = FakeRequest("r", list(range(40)), 1)
    hashed = HashedPrompt(TurnId("r"), pack(request.all_token_ids), HashedPrefix(BLOCK))
    node: Any = SimpleNamespace(
        is_waiting=lambda turn_id: False, resume=lambda turn_id, tokens: Replay(start, floor)
    )
    side: Any = SimpleNamespace(state=node)
    turns = {TurnId("r"): TrackedRequest(request, b"", prompt=hashed)}
    resuming = Resuming(
        side, turns, replays=replays, block_tokens=BLOCK, ask=lambda turn, hit, resident: None
    )
    assert resuming.at(request, 8, resident=32, may_replay=True) == goes_on_at
