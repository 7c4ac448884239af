"""The refill share that a node states, by prices and tiers; and how busy its engine was."""

from __future__ import annotations

from math import exp

import pytest

from ownerserve.cache.policies.lru import Lru
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.status import REFILL_SHARE_MAX, RefillShare
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.runtime.busy import BUSY_WINDOW_S, BusyMeter
from ownerserve.node.runtime.refill import LOOK_EVERY_S, RefillGauge
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of

BLOCKS = 64
TOKENS = BLOCKS * B
COSTS = Defaults("by hand", Coefficients(5.0, 10.0, 0.0), {Tier.DISK: Medium(0.0, 64.0)})
"""10 ms a token to compute; one of 64 bytes a ms from the disk."""


class Device:
    """Sessions of 16 blocks on a device that holds four, and its gauge."""

    def __init__(self) -> None:
        self.driver = Driver(DENSE, blocks=BLOCKS, policy=Lru())
        self.cache = self.driver.cache
        self.cache.pressure.watermarks = Watermarks(0.0, 0.0)
        self.inventory = Inventory()
        self.gauge = RefillGauge(self.cache, self.inventory, CostModel(COSTS))

    def sit(self, *names: str, every_s: float = 100.0) -> None:
        for name in names:
            self.driver.now += every_s
            tokens = blocks_of(*[ord(name)] * 16)
            self.driver.turn(f"t{self.driver.now}", tokens, session=name)

    def shares(self, after_s: float = 100.0) -> tuple[RefillShare, ...]:
        self.driver.now += after_s
        return self.gauge.shares(self.driver.now)


def test_sizes_are_parts_of_what_the_device_holds() -> None:
    told = Device().shares()
    assert told == tuple(RefillShare(TOKENS // part, 0.0) for part in (64, 16, 4, 2))


def test_it_is_nothing_until_something_would_be_displaced_and_more_from_then_on() -> None:
    device = Device()
    device.sit("a", "b", "c")
    told = device.shares()
    assert [one.share for one in told[:3]] == [0.0, 0.0, 0.0], "a quarter is free"
    # All that is held takes 48 blocks of 16 tokens 10 ms each to bring back; `a` has been idle
    # for 300 s.
    assert told[-1].share == pytest.approx(48 * B * 10.0 / 300_000.0)
    device.sit("d", "e", "f")
    assert device.cache.counters.evictions
    told = device.shares()
    assert all(one.share > 0.0 for one in told)
    assert [one.share for one in told] == sorted(one.share for one in told)
    assert told[0].share == pytest.approx(TOKENS * 10.0 / 500_000.0)


def test_what_was_let_go_costs_nothing_to_lose_and_need_not_be_brought_back() -> None:
    device = Device()
    device.sit("a", "b", "c", "d")
    for name in "ab":
        device.cache.sessions.release(SessionId(name))
    told = device.shares()
    assert [one.share for one in told] == [0.0] * 4
    device.sit("e", "f", "g")
    # What goes next is `d`; of those that are held, nobody is let go any more.
    assert device.shares()[0].share == pytest.approx(TOKENS * 10.0 / 500_000.0)


def test_a_device_that_can_take_no_more_says_so() -> None:
    device = Device()
    device.sit("a")
    device.driver.begin("t", blocks_of(*[1] * 40, tail=1))
    assert device.driver.compute("t", blocks_of(*[1] * 40))
    assert device.shares()[-1].share == REFILL_SHARE_MAX


def test_what_a_tier_below_has_is_loaded_where_that_is_quicker() -> None:
    device = Device()
    device.sit("a", "b", "c", "d")
    anew = device.shares()[0].share
    for name in "abcd":
        device.inventory.has(SessionId(name), Tier.DISK, 16 * B, digest=None)
    loaded = device.shares(after_s=LOOK_EVERY_S)[0].share
    # A token takes 64 bytes: 1 ms from the disk, 10 to compute.
    assert loaded == pytest.approx(anew / 10.0, rel=0.01)
    device.inventory.has(SessionId("a"), Tier.DISK, 8 * B, digest=None)
    # Half of `a` is no way back to it. Two were looked at: one of them is computed.
    half = device.shares(after_s=LOOK_EVERY_S)[0].share
    assert half == pytest.approx(anew * (1.0 + 0.1) / 2, rel=0.02)


def test_a_look_is_good_for_a_while() -> None:
    device = Device()
    device.sit("a", "b", "c", "d")
    told = device.shares()
    device.cache.sessions.release(SessionId("a"))
    assert device.shares(after_s=LOOK_EVERY_S / 2) is told
    assert device.shares(after_s=LOOK_EVERY_S / 2) != told


# ---- the busy meter


def test_an_engine_is_as_busy_as_it_was_from_its_first_second_on() -> None:
    meter, busy_s = BusyMeter(100.0), 0.0
    assert meter.read(0.0, 100.0) == 0.0
    for second in range(1, 600):
        busy_s += 0.25
        assert meter.read(busy_s, 100.0 + second) == pytest.approx(0.25)


def test_what_was_a_minute_ago_counts_for_a_third() -> None:
    meter = BusyMeter(0.0)
    assert meter.read(3600.0, 3600.0) == pytest.approx(1.0)
    idle = meter.read(3600.0, 3600.0 + BUSY_WINDOW_S)
    assert idle == pytest.approx(exp(-1.0), rel=1e-3)
    assert meter.read(3600.0, 3600.0 + BUSY_WINDOW_S) == idle, "asking changes nothing"
    assert meter.read(3600.0, 1e6) == pytest.approx(0.0)


def test_a_step_that_began_before_the_last_reading_makes_no_more_than_all_of_the_time() -> None:
    meter = BusyMeter(0.0)
    meter.read(0.0, 59.0)
    assert meter.read(60.0, 60.0) < 0.1
    assert meter.read(5000.0, 61.0) <= 1.0
