"""What the connector's scheduler side copies of requests, from whose blocks, and for how long it
holds them: scenarios of a fake vLLM scheduler."""

from __future__ import annotations

import pytest

from ownerserve.engines.vllm.tenants import Tenants
from ownerserve.store.format.model import ArtifactKind
from tests.support.vllm_parts.fake_vllm.play import Play
from tests.support.vllm_parts.fake_vllm.side import Setup

pytestmark = pytest.mark.engine

ROOM = 100
"""Copies for which there is always room."""


def play_of(shape: str, *, ranks: int = 1) -> Play:
    return Play(Setup(shape, ranks, "turn-end", ROOM), drafts=0, ahead=False)


def step(play: Play, *, keeps: bool = True) -> None:
    """A step, with all copies made that it asks for: durable, or refused by the drive."""
    while play.engine.lookup.asked:
        play.look_up()
    play.schedule()
    play.answer(accepted=0)
    for rank, worker in enumerate(play.engine.ranks):
        while worker.uncopied:
            play.copy(rank, 0)
        while worker.unsaved:
            play.settle(rank, 0, keeps=keeps)


def stored_ends(play: Play) -> list[int]:
    return sorted(stored.meta.end_token for stored in play.engine.ranks[0].store.values())


def test_what_a_step_in_flight_computes_is_not_saved_at_a_requests_end() -> None:
    play = play_of("dense")
    request = play.arrive(list(range(19)), max_tokens=9)
    step(play)
    step(play)
    play.schedule()  # token 19, which ends a block
    assert request.num_computed_tokens == 20
    play.abort(request)
    play.end()
    assert stored_ends(play) == [8, 16], "the step's block is stored, and nobody has its answer"


def test_a_request_given_up_after_a_reset_amid_its_steps_left_nothing() -> None:
    """vLLM takes its blocks and its computed tokens, and counts those in flight on until the step
    is answered: fewer than none were computed, an error that switched the connector off."""
    play = Play(Setup("long blocks", 1, "turn-end", ROOM), drafts=0, ahead=True)
    for first in (0, 100):  # of the second the step computes less than a block
        request = play.arrive(list(range(first, first + 10)), max_tokens=9)
        play.look_up()
    play.schedule()
    play.forget_cache()
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (0, 6)
    play.abort(request)
    play.end()
    assert play.seen["reset amid steps"] == 1


def test_a_salt_that_can_name_no_tenant_shares_nothing() -> None:
    """The store's secret can't be read: a salted request is served without us."""
    setup = Setup("dense", 1, "full", ROOM, tenants=Tenants(None))
    play = Play(setup, drafts=0, ahead=False)
    play.arrive(list(range(30)), max_tokens=2, cache_salt="a")
    play.finish()
    play.end()
    assert play.engine.side.status()["bypassed_cache_salt"] == 1
    assert not play.engine.oracle.asked_for


def test_a_preempted_request_is_looked_for_and_loads_what_it_had_stored() -> None:
    play = play_of("dense")
    request = play.arrive(list(range(30)), max_tokens=9)
    for _ in range(3):
        step(play)
    play.forget_cache()
    assert request.num_preemptions == 1
    play.finish()
    play.end()
    assert play.seen["good loads"] == 1


def test_a_request_that_is_here_when_weights_change_is_kept_no_more() -> None:
    """vLLM has what it computed before in its cache still: preempted and admitted anew, the request
    goes on from there, and what it has then is of no one weights."""
    play = play_of("dense")
    request = play.arrive(list(range(30)), max_tokens=9)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    play.change_weights()
    asked_for = set(play.engine.oracle.asked_for)
    play.forget_cache()  # it can't: blocks are held until they are copied
    assert request.num_preemptions == 1
    assert play.pool.get_cached_block(request.block_hashes[0], [0])
    play.finish()
    play.end()
    assert play.engine.oracle.asked_for == asked_for


def test_blocks_are_free_once_they_are_copied_whatever_the_drive_does() -> None:
    play = play_of("dense", ranks=2)
    play.arrive(list(range(30)), max_tokens=9)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    assert play.engine.side.status()["holds"]
    for rank, worker in enumerate(play.engine.ranks):
        while worker.uncopied:
            play.copy(rank, 0)
    play.schedule()
    play.answer(accepted=0)
    copied = {save.operation_id for save, _ in play.engine.ranks[0].unsaved}
    assert copied, "nothing is written yet"
    assert play.engine.side.status()["holds"] <= len(play.engine.oracle.open.keys() - copied)
    play.end()


def test_one_rank_that_did_not_keep_a_record_is_enough() -> None:
    play = play_of("dense", ranks=2)
    play.arrive(list(range(16)), max_tokens=1)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    for rank, worker in enumerate(play.engine.ranks):
        while worker.uncopied:
            play.copy(rank, 0)
        while worker.unsaved:
            play.settle(rank, 0, keeps=rank == 1)
    play.finish()
    play.end()
    status = play.engine.side.status()
    assert (status["save_not_kept"], status.get("save_kept", 0)) == (2, 0)
    assert status["unsaved_tokens"] == 16


def test_a_connector_that_is_switched_off_keeps_no_pinned_points() -> None:
    play = play_of("windows")
    request = play.arrive(list(range(18)), max_tokens=9)
    while request.num_computed_tokens < 21:  # a boundary within the answer is pinned
        step(play)
    play.engine.side.switch_off()
    while not request.is_finished():
        step(play)
    assert not play.engine.side.status()["holds"]
    assert play.pool.reset(), "blocks that nobody gives back"
    play.end()


def test_a_point_is_copied_from_its_own_place_though_a_later_one_is_pinned() -> None:
    """The point at the prompt's end was refused by the drive, one of the answer is pinned when
    vLLM takes the blocks: computed again, the first is copied again."""
    play = play_of("windows")
    request = play.arrive(list(range(17)), max_tokens=9)
    while request.num_computed_tokens < 21:
        step(play, keeps=False)
    play.forget_cache()
    play.pool.evict_blocks(range(1, play.pool.num_gpu_blocks))  # others have taken them
    play.finish()  # the copies' rows are compared with what their names say
    play.end()
    metas = [at.meta for at in play.engine.ranks[0].store.values()]
    assert 16 in [meta.end_token for meta in metas if meta.kind is ArtifactKind.POINT]
