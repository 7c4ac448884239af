"""One contract for all policies, what each is for, and the baseline's deadlock."""

from __future__ import annotations

import pytest

from ownerserve.cache.outcomes import Begun, NoRoom
from ownerserve.cache.policies import EVICTION_POLICIES
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.cache.policies.fifo import Fifo
from ownerserve.cache.policies.lfu import Lfu
from ownerserve.cache.policies.lru import Lru
from ownerserve.cache.policies.pinned_slot import PinnedSlot
from ownerserve.cache.policies.priority import Priority
from ownerserve.cache.policies.slru import Slru
from ownerserve.cache.policies.tail_latency import TailLatency
from ownerserve.kv.ids import SessionId, TurnId
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of

ALL = sorted(EVICTION_POLICIES)


def filled(policy: EvictionPolicy, sessions: str = "abc", length: int = 4) -> Driver:
    """Idle conversations without a session, one second apart, first `a`."""
    driver = Driver(DENSE, blocks=40, policy=policy)
    for number, name in enumerate(sessions):
        driver.now = float(number)
        driver.turn(name, prompt(name, length))
    return driver


def prompt(name: str, length: int = 4) -> bytes:
    return blocks_of(*(ord(name) * 100 + step for step in range(length)))


def left(driver: Driver, names: str = "abc") -> list[int]:
    """Resident blocks of each conversation."""
    return [driver.cache.match(prompt(name)).range_tokens // B for name in names]


# -- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_frees_just_what_is_asked(name: str) -> None:
    driver = filled(EVICTION_POLICIES[name]())
    for count in (1, 1, 2, 5):
        before = sum(left(driver))
        driver.evict(count)
        assert sum(left(driver)) == before - count


@pytest.mark.parametrize("name", ALL)
def test_never_takes_a_running_turns_path(name: str) -> None:
    driver = filled(EVICTION_POLICIES[name]())
    assert isinstance(driver.begin("live", prompt("a") + blocks_of(1)), Begun)
    driver.evict(1000)
    assert left(driver) == [4, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_all_that_no_turn_or_pin_holds_can_go(name: str) -> None:
    driver = filled(EVICTION_POLICIES[name]())
    driver.evict(1000)
    assert left(driver) == [0, 0, 0]
    assert driver.cache.occupancy.blocks.used == 0


@pytest.mark.parametrize("name", ALL)
def test_a_prefix_outlives_what_hangs_on_it(name: str) -> None:
    driver = Driver(DENSE, blocks=40, policy=EVICTION_POLICIES[name]())
    for number in range(4):
        driver.turn(str(number), blocks_of(1, 2, 10 + number))
    for gone in range(1, 5):
        driver.evict(1)
        assert driver.cache.match(blocks_of(1, 2)).range_tokens == 2 * B, gone


@pytest.mark.parametrize("name", ALL)
def test_the_same_calls_choose_the_same_victims(name: str) -> None:
    runs = []
    for _ in range(2):
        driver = filled(EVICTION_POLICIES[name]())
        driver.evict(5)
        runs.append(left(driver))
    assert runs[0] == runs[1]


# -- what each is for --------------------------------------------------------------------------


def test_lru_takes_the_least_recent() -> None:
    driver = filled(Lru())
    driver.now = 10.0
    driver.turn("again", prompt("a"))
    driver.evict(4)
    assert left(driver) == [4, 0, 4]


def test_fifo_ignores_use() -> None:
    driver = filled(Fifo())
    driver.now = 10.0
    driver.turn("again", prompt("a"))
    driver.evict(4)
    assert left(driver) == [0, 4, 4]


def hybrid(policy: EvictionPolicy) -> Driver:
    driver = Driver(policy=policy, points=12)
    for number, name in enumerate("abc"):
        driver.now = float(number)
        driver.turn(name, prompt(name) + blocks_of(0, tail=1))
    return driver


@pytest.mark.parametrize("policy", [Lfu, Slru])
def test_lfu_and_slru_keep_what_was_used_again(policy: type[EvictionPolicy]) -> None:
    driver = hybrid(policy())
    driver.now = 5.0
    driver.turn("again", prompt("a") + blocks_of(0, tail=1))
    driver.now = 6.0
    driver.turn("d", prompt("d", 3) + blocks_of(tail=1))
    driver.evict(5)
    assert left(driver) == [4, 0, 4]


def test_coming_back_counts_as_use_without_point_state_too() -> None:
    driver = filled(Lfu())
    driver.now = 5.0
    driver.turn("again", prompt("a"))
    driver.now = 6.0
    driver.turn("d", prompt("d"))
    driver.evict(12)
    assert left(driver, "abcd") == [4, 0, 0, 0]


def test_priority_goes_before_recency() -> None:
    driver = Driver(DENSE, blocks=40, policy=Priority())
    for number, name in enumerate("abc"):
        driver.now = float(number)
        assert isinstance(driver.begin(name, prompt(name), priority=2 - number), Begun)
        driver.prefill(name)
        driver.finish(name)
    driver.evict(4)
    assert left(driver) == [4, 4, 0]


def test_tail_latency_spreads_the_loss_within_the_budget() -> None:
    """Each conversation may lose 2 blocks for nothing; only then does one lose more."""
    driver = filled(TailLatency(budget_tokens=3 * B, expected_new_tokens=B))
    driver.evict(2)
    driver.evict(2)
    driver.evict(2)
    assert sorted(left(driver)) == [2, 2, 2]


def test_cost_aware_takes_the_cheaper_of_two_equally_old() -> None:
    """A token deep in a context costs more to compute than one at its start."""
    driver = Driver(DENSE, blocks=60, policy=CostAware(context_tokens=64.0))
    driver.turn("long", prompt("l", 30))
    driver.turn("short", prompt("s", 4))
    driver.evict(4)
    assert driver.cache.match(prompt("l", 30)).range_tokens == 30 * B
    assert driver.cache.match(prompt("s", 4)).range_tokens == 0


def test_cost_aware_prefers_a_session_within_its_ttl() -> None:
    driver = Driver(DENSE, blocks=60)
    driver.turn("1", prompt("a"), session="a")
    driver.now = 5.0
    driver.turn("2", prompt("b"))
    driver.evict(4)
    assert left(driver, "ab") == [4, 0]


def test_cost_aware_ages_what_was_dear_once() -> None:
    driver = Driver(DENSE, blocks=60)
    for _ in range(5):
        driver.now += 1
        driver.turn("old", prompt("a"))
    for number in range(60):
        driver.now += 1
        driver.turn("new", blocks_of(*(1000 * number + step for step in range(30))))
    assert left(driver, "a") == [0]


def test_blocks_that_restore_nothing_go_first() -> None:
    """A hybrid session whose point state went leaves range blocks that only a replay could use."""
    driver = Driver(points=6)
    driver.turn("1", prompt("a") + blocks_of(0, tail=1), session="a")
    driver.turn("2", prompt("b") + blocks_of(0, tail=1), session="b")
    driver.evict(1)
    first = [driver.cache.sessions.status(SessionId(name)) for name in "ab"]
    assert sorted(s.resident_tokens // B for s in first if s) == [4, 5]
    driver.evict(4)
    then = [driver.cache.sessions.status(SessionId(name)) for name in "ab"]
    assert sorted(s.resident_tokens // B for s in then if s) == [0, 5], "the same one goes on"


# -- sglang issue #27024 -----------------------------------------------------------------------


def idle_sessions_fill_the_pool(policy: EvictionPolicy) -> Driver:
    driver = Driver(DENSE, blocks=12, policy=policy)
    for name in "abc":
        driver.turn(name, prompt(name), session=name)
    assert driver.cache.occupancy.blocks.free == 0 and not driver.cache.running
    return driver


def test_pinned_slots_deadlock() -> None:
    """Nothing runs, nothing ever will: every session waits for a block that idle ones pin."""
    driver = idle_sessions_fill_the_pool(PinnedSlot())
    driver.now = 1e6
    for name in "abcd":
        assert isinstance(driver.begin("next " + name, prompt(name) + blocks_of(1)), Begun)
        got = driver.cache.reserve(TurnId("next " + name), 5 * B, driver.now)
        assert isinstance(got, NoRoom)
        driver.abort("next " + name)
    driver.cache.sessions.release(SessionId("a"))
    assert driver.turn("next", prompt("b") + blocks_of(1), session="b").restored == 4 * B


@pytest.mark.parametrize("name", [name for name in ALL if name != "pinned-slot"])
def test_no_other_policy_deadlocks(name: str) -> None:
    driver = idle_sessions_fill_the_pool(EVICTION_POLICIES[name]())
    for session in "abcd":
        driver.now += 1.0
        driver.turn("next " + session, prompt(session) + blocks_of(1), session=session)


def test_what_another_session_stands_on_is_weighed_anew_behind_its_tail() -> None:
    """`b` goes on from `a`'s prompt. Its tail goes first, then the older `c`, not what `a` has."""
    driver = Driver(DENSE, blocks=40, policy=Lru())
    shared = prompt("a", 2)
    driver.turn("b", shared + prompt("b", 4))
    driver.now = 5.0
    driver.turn("c", prompt("c", 2))
    driver.now = 10.0
    driver.turn("a", shared + blocks_of(tail=1))
    driver.evict(5)
    assert driver.cache.match(shared + blocks_of(tail=1)).range_tokens == 2 * B
    assert driver.cache.match(prompt("c", 2) + blocks_of(tail=1)).range_tokens == B
