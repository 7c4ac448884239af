"""What would go next: in the evictor's own order, without what is free or nobody's."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.cache.policies.lru import Lru
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import SessionId
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of
from tests.support.examples import examples


def driver(*, blocks: int, low: float = 0.0, high: float = 0.0) -> Driver:
    made = Driver(DENSE, blocks=blocks, policy=Lru())
    made.cache.pressure.watermarks = Watermarks(low, high)
    return made


def sit(at: Driver, name: str, symbol: int, blocks: int, now: float) -> None:
    """A session of so many blocks, idle from `now` on."""
    at.now = now
    at.turn(f"t-{name}-{now}", blocks_of(*[symbol] * blocks), session=name)


def test_it_is_the_least_idle_of_what_would_go_and_nothing_while_there_is_room() -> None:
    here = driver(blocks=12)
    for number, name in enumerate("abc"):
        sit(here, name, number, 3, now=10.0 * number)
    look = here.cache.turnover.look(12 * B)
    assert (look.spare_tokens, look.held_tokens) == (3 * B, 9 * B)
    ages = [look.idle_s(blocks * B, 100.0) for blocks in (0, 3, 4, 6, 7, 9, 12, 13)]
    assert ages == [inf, inf, 100.0, 100.0, 90.0, 90.0, 80.0, 0.0]


def test_what_the_cache_keeps_free_is_no_room() -> None:
    here = driver(blocks=20, low=0.1, high=0.25)
    sit(here, "a", 1, 15, now=0.0)
    look = here.cache.turnover.look(B)
    assert look.spare_tokens == 0
    assert look.idle_s(1, 50.0) == 50.0


def test_a_session_that_was_let_go_or_has_lost_its_tail_to_an_edit_displaces_nobody() -> None:
    here = driver(blocks=8)
    sit(here, "a", 1, 4, now=0.0)
    sit(here, "b", 2, 4, now=10.0)
    assert here.cache.turnover.look(4 * B).idle_s(4 * B, 20.0) == 20.0
    here.cache.sessions.release(SessionId("a"))
    look = here.cache.turnover.look(8 * B)
    assert [one.sessions for one in look.leaving] == [(), ("b",)]
    assert look.idle_s(4 * B, 20.0) == inf
    assert look.idle_s(5 * B, 20.0) == 10.0


def test_of_a_session_that_went_back_only_what_it_left_is_nobodys() -> None:
    here = driver(blocks=12)
    sit(here, "a", 1, 6, now=0.0)
    sit(here, "a", 1, 2, now=10.0)
    (first,) = here.cache.turnover.look(12 * B).leaving
    assert (first.start, first.end, first.sessions) == (2 * B, 6 * B, ())


def test_what_a_turn_uses_now_can_not_go() -> None:
    here = driver(blocks=8)
    sit(here, "a", 1, 3, now=0.0)
    here.now = 5.0
    here.begin("running", blocks_of(1, 1, 1, 7, tail=1), session="a")
    look = here.cache.turnover.look(8 * B)
    assert look.idle_s(5 * B, 9.0) == inf
    assert look.idle_s(6 * B, 9.0) == 0.0


def test_a_session_that_came_back_is_no_longer_among_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its entry in the order is of before; a look of two entries finds the two that are idle."""
    here = driver(blocks=12)
    for number, name in enumerate("abcd"):
        sit(here, name, number, 3, now=10.0 * number)
    sit(here, "a", 0, 3, now=60.0)
    monkeypatch.setattr("ownerserve.cache.turnover.LOOK_INTERVALS", 2)
    look = here.cache.turnover.look(12 * B)
    assert [one.sessions for one in look.leaving] == [("b",)], "one entry was put where it belongs"
    look = here.cache.turnover.look(12 * B)
    assert [one.sessions for one in look.leaving] == [("b",), ("c",)]
    # Beyond what was looked at idle ages fall evenly: 80 s for 6 of 12 blocks, so 40 for 9.
    assert [look.idle_s(blocks * B, 100.0) for blocks in (6, 9, 12)] == [80.0, 40.0, 0.0]


steps = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 6), st.integers(1, 30)), min_size=4, max_size=14
)


@settings(max_examples=examples(100), deadline=None)
@given(steps, st.integers(1, 16), st.sampled_from([Lru, CostAware]))
def test_the_look_is_what_the_evictor_then_does(
    told: list[tuple[int, int, int]], wanted: int, policy: type[Lru] | type[CostAware]
) -> None:
    """Of sessions that only grow, whoever loses something stood in the look; the first one does."""
    here = Driver(DENSE, blocks=20, policy=policy())
    here.cache.pressure.watermarks = Watermarks(0.0, 0.0)
    grown: dict[int, int] = {}
    for which, more, wait in told:
        here.now += wait
        blocks = grown[which] = min(grown.get(which, 0) + more, 18)
        here.turn(f"t{here.now}", blocks_of(*[which] * blocks), session=f"s{which}")
    here.cache.check()
    names = [SessionId(f"s{which}") for which in range(8)]
    before = {name: here.cache.residents.tokens_of(name) for name in names}
    look = here.cache.turnover.look(wanted * B)
    free = here.cache.occupancy.blocks.free
    held = {name for one in look.leaving for name in one.sessions}
    evictable = here.cache.occupancy.evictable_blocks()
    missing = min(wanted - free, evictable)
    if missing <= 0:
        assert wanted - free > 0 or look.leaving == ()
        return
    here.cache.pressure.evict_blocks(missing)
    lost = {name for name in names if here.cache.residents.tokens_of(name) != before[name]}
    assert lost <= held
    assert set(look.leaving[0].sessions) <= lost
