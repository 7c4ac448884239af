"""What the scheduler machine found, and that what it is about does happen."""

from __future__ import annotations

import pytest

from tests.support.vllm_parts.fake_vllm.play import Play
from tests.support.vllm_parts.fake_vllm.side import SHAPES, Setup

pytestmark = pytest.mark.engine

ROOM = 100
"""Copies for which there is always room."""


def asked_twice(setup: Setup, tokens: int, *, drafts: int = 0, ahead: bool = False) -> Play:
    """One prompt, computed, stored, and asked for when vLLM has forgotten it."""
    play = Play(setup, drafts=drafts, ahead=ahead)
    prompt = list(range(tokens))
    for _ in range(2):
        play.arrive(prompt, max_tokens=5)
        while play.here or play.engine.oracle.open or play.scheduler.in_flight:
            play.run(1)
        play.reset_cache(new_weights=False)
    play.end()
    return play


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_stored_is_loaded_where_it_lands_in_host_memory(shape: str, ranks: int) -> None:
    """As on a GPU, with `restores` at `always`: its prices had none for host memory, and the first
    prompt with a choice of points switched the connector off."""
    play = asked_twice(Setup(shape, ranks, "full", ROOM), 30, drafts=2)
    assert play.seen["good loads"] == 1, play.seen


def test_a_lead_may_be_as_long_as_a_record_of_the_grid() -> None:
    """Which `record_blocks` of 8 or less make of it."""
    play = Play(Setup("windows", 1, "branches", ROOM), drafts=0, ahead=False)
    for tokens in range(9, 33):
        play.arrive([tokens * 100 + at for at in range(tokens)], max_tokens=2)
        play.run(6)
    play.end()
    leads = [s for s in play.engine.ranks[0].store.values() if s.meta.component == "swa_lead"]
    assert any(s.meta.units == 2 and not s.meta.first_token % 8 for s in leads)
