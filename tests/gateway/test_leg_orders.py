"""Whatever comes in whatever order, a turn with two legs has one answer, each receipt is given back
once, and nobody works for a client that is gone. OWNERSERVE_LEG_STEPS=9 takes longer walks."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.gateway.config import PrefillLegs
from ownerserve.router.worker import WorkerRole
from tests.support.examples import examples
from tests.support.gateway.leg_play import LegPlay

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("OWNERSERVE_LEG_STEPS", "6"))
BODY = {"messages": [{"role": "user", "content": "go on"}], "stream": True, "seed": 7}
ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
KINDS: dict[str, dict[str, Any]] = {
    "hedge": {"hedge_after_s": 1.0},
    "carry_on": {"carry_on": True, "hedge_after_s": 1.0},
    "prefill": {"policy": "static_pd", "roles": ROLES},
    "ahead": {"policy": "static_pd", "roles": ROLES, "prefill_legs": PrefillLegs.BOTH},
}
OUTCOMES = {
    "hedge": {"sent", "won", "outrun", "failed", "instead", "aborted", "nobody"},
    "carry_on": {"begun", "done", "differs", "nobody"},
    "prefill": {"done", "connect", "closed", "refused", "malformed"},
    "ahead": {"computed", "connect", "closed", "refused", "unwanted"},
}
BEGINS = {"carry_on": ("w0 opens", "1 streams", "1 says")}
"""A stream has begun; what comes before it is the same for all."""
Outcomes = Counter[tuple[str, str]]


def walked(kind: str, steps: tuple[str, ...], seen: Outcomes) -> tuple[str, ...]:
    """Take the steps, and return those that could come next; end the turn, and look."""
    play = LegPlay(BODY, **KINDS[kind])
    try:
        for step in steps:
            play.do(step)
        following = tuple(play.steps())
        if not play.is_gone and not play.client.ends:
            play.do("client gone")
        play.check_over()
        seen.update(play.gateway.legs.counts)
    finally:
        play.close()
    return following


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_of_the_first_steps(kind: str) -> None:
    begins = BEGINS.get(kind, ())
    ways: list[tuple[str, ...]] = [begins]
    seen = Outcomes()
    while ways:
        way = ways.pop()
        following = walked(kind, way, seen)
        if len(way) < max(STEPS, len(begins) + STEPS - 1) and "client gone" not in way:
            ways += [(*way, step) for step in following]
    assert {outcome for leg, outcome in seen if leg == kind} == OUTCOMES[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_long_walks(kind: str, data: st.DataObject) -> None:
    play = LegPlay(BODY, **KINDS[kind])
    try:
        for _ in range(25):
            following = [step for step in play.steps() if step != "client gone"]
            if not following or play.client.ends:
                break
            play.do(data.draw(st.sampled_from(following)))
        if not play.client.ends:
            play.do("client gone")
        play.check_over()
    finally:
        play.close()


def test_a_worker_that_says_less_than_the_client_has_ends_no_answer() -> None:
    play = LegPlay(BODY, **KINDS["carry_on"])
    try:
        for step in ("w0 opens", "1 streams", "1 says", "1 fails"):
            play.do(step)
        [opens] = [step for step in play.steps() if step.endswith("opens")]
        play.do(opens)
        other = int(opens[1]) + 1
        play.do(f"{other} streams")
        play.do(f"{other} ends")
        assert play.client.ends == ["cut"]
        assert b"worker_lost" in play.client.written
        play.check_over()
    finally:
        play.close()
