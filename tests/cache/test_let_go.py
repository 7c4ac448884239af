"""What a session leaves behind when it goes on elsewhere, or is over, goes before all else."""

from __future__ import annotations

import pytest

from ownerserve.cache.policies import EVICTION_POLICIES
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of

POLICIES = [name for name in EVICTION_POLICIES if name != "pinned-slot"]
"""That one keeps idle sessions under a lock, which is another rule."""


def three_idle(policy: str) -> Driver:
    """Sessions a, b and c of four blocks each; c is the newest."""
    driver = Driver(DENSE, blocks=12, policy=EVICTION_POLICIES[policy]())
    for number, name in enumerate("abc"):
        driver.now = float(number)
        driver.turn(name, blocks_of(*range(4 * number, 4 * number + 4)), session=name)
    driver.now = 5.0
    return driver


def held(driver: Driver) -> list[int]:
    spans = (range(first, first + 4) for first in (0, 4, 8))
    return [driver.check_match(blocks_of(*span, 99)).range_tokens // B for span in spans]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_let_go_is_evicted_before_all_else(policy: str) -> None:
    driver = three_idle(policy)
    driver.cache.sessions.let_go(SessionId("c"))
    driver.check()
    assert held(driver) == [4, 4, 4], "nothing is freed by itself"
    driver.evict(3)
    assert held(driver) == [4, 4, 1]
    driver.evict(1)
    assert held(driver) == [4, 4, 0]
    driver.cache.sessions.expire(1e6)
    assert driver.cache.sessions.get(SessionId("c")) is None, "a record of nothing is forgotten"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_that_is_over_leaves_what_goes_first(policy: str) -> None:
    driver = three_idle(policy)
    driver.cache.sessions.release(SessionId("c"))
    driver.evict(4)
    driver.check()
    assert held(driver) == [4, 4, 0]


def test_the_session_comes_back_and_is_one_like_others() -> None:
    driver = three_idle("lru")
    driver.cache.sessions.let_go(SessionId("c"))
    driver.now = 6.0
    driver.turn("again", blocks_of(8, 9, 10, 11), session="c")
    driver.evict(4)
    assert held(driver)[2] == 4 and held(driver)[0] == 0


def test_what_another_session_stands_on_stays_as_it_is() -> None:
    driver = Driver(DENSE, blocks=12, policy=EVICTION_POLICIES["lru"]())
    driver.turn("a", blocks_of(0, 1), session="a")
    driver.now = 1.0
    driver.turn("b", blocks_of(0, 1, 2, 3), session="b")
    driver.now = 2.0
    driver.turn("c", blocks_of(4, 5, 6, 7), session="c")
    driver.cache.sessions.let_go(SessionId("b"))
    driver.evict(2)
    driver.check()
    assert driver.check_match(blocks_of(0, 1, 9)).range_tokens == 2 * B
    assert driver.check_match(blocks_of(4, 5, 6, 7, 9)).range_tokens == 4 * B
    driver.cache.sessions.let_go(SessionId("a"))
    driver.evict(2)
    assert driver.check_match(blocks_of(0, 1, 9)).range_tokens == 0


def test_a_turn_that_waits_here_keeps_what_was_let_go() -> None:
    driver = three_idle("lru")
    driver.cache.sessions.let_go(SessionId("c"))
    driver.cache.residents.retain("t", blocks_of(8, 9, 10, 11), driver.now)  # type: ignore[arg-type]
    driver.evict(4)
    driver.check()
    assert held(driver)[2] == 4


def test_one_that_runs_or_is_unknown_is_not_let_go() -> None:
    driver = three_idle("lru")
    with pytest.raises(InvalidInput, match="unknown"):
        driver.cache.sessions.let_go(SessionId("nobody"))
    driver.evict(1)
    driver.begin("t", blocks_of(8, 9, 10, 11, 12), session="c")
    with pytest.raises(InvalidInput, match="runs"):
        driver.cache.sessions.let_go(SessionId("c"))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_turn_for_somebody_else_added_goes_before_all_else(policy: str) -> None:
    """The newest of all, and of no session: what was here before it and the others' stays."""
    driver = Driver(DENSE, blocks=12, policy=EVICTION_POLICIES[policy]())
    driver.turn("own", blocks_of(0, 1))
    driver.now = 1.0
    driver.turn("a", blocks_of(4, 5, 6, 7), session="a")
    driver.now = 2.0
    prompt = blocks_of(0, 1, 2, 3, 10, 11)
    driver.turn("others", prompt)
    leftovers = driver.cache.leftovers
    assert leftovers.let_go(prompt, behind=2) == 4
    driver.evict(4)
    driver.check()
    assert driver.check_match(blocks_of(0, 1, 9)).range_tokens == 2 * B
    assert driver.check_match(blocks_of(4, 5, 6, 7, 9)).range_tokens == 4 * B
    assert leftovers.let_go(prompt, behind=2) == 0, "it is gone"


def test_it_is_freed_at_once_where_that_is_wanted_but_not_what_is_held() -> None:
    driver = three_idle("lru")
    driver.evict(4)
    driver.now = 6.0
    prompt = blocks_of(20, 21, 22, 23)
    driver.turn("others", prompt)
    lent = driver.cache.lends.lend([prompt[: 2 * len(prompt) // 4]], 6.0, idle_s=5.0)
    leftovers = driver.cache.leftovers
    assert leftovers.let_go(prompt, behind=0) == 2
    leftovers.free(2)
    driver.cache.lends.end(lent)
    assert leftovers.let_go(prompt, behind=0) == 2
    leftovers.free(2)
    driver.check()
    assert held(driver) == [0, 4, 4]
    assert driver.cache.occupancy.blocks.free == 4


def test_what_a_session_or_a_waiting_turn_stands_on_is_nobody_s_leftover() -> None:
    driver = three_idle("lru")
    leftovers, prompt = driver.cache.leftovers, blocks_of(8, 9, 10, 11)
    assert leftovers.let_go(prompt, behind=0) == 0
    driver.evict(8)
    assert held(driver)[2] == 4
    assert leftovers.let_go(blocks_of(30, 31), behind=0) == 0, "nothing of it is here"
