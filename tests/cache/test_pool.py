"""Free lists: the traps."""

from __future__ import annotations

import pytest

from ownerserve.cache.pools.slot_pools import SlotPool
from ownerserve.kv.errors import CapacityExceeded, InvalidInput, InvariantViolated


def test_taking_nothing_takes_nothing() -> None:
    """`freed[-0:]` is the whole list."""
    pool = SlotPool("kv", 4)
    pool.give(pool.take(3))
    assert pool.take(0) == []
    assert pool.free == 4


def test_returned_slots_come_before_new_ones() -> None:
    pool = SlotPool("kv", 4)
    pool.give(pool.take(2))
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.free_slots() == [3]


def test_too_many_is_an_error_and_takes_none() -> None:
    pool = SlotPool("kv", 2)
    pool.take(1)
    with pytest.raises(CapacityExceeded, match="2 slots wanted, 1 free"):
        pool.take(2)
    assert pool.used == 1
    with pytest.raises(InvalidInput, match=r"slots\[kv\]"):
        SlotPool("kv", -1)


def test_one_slot_is_taken_and_given_as_a_list_of_one_would_be() -> None:
    pool = SlotPool("state", 2)
    first, second = pool.take_one(), pool.take_one()
    assert (first, second, pool.free) == (0, 1, 0)
    with pytest.raises(CapacityExceeded, match="a slot wanted, 0 free"):
        pool.take_one()
    pool.give_one(first)
    assert (pool.take_one(), pool.free) == (first, 0)


@pytest.mark.parametrize("slots", [[2], [0, 1, 0], [1, 3], [-1], [0, 1, 2]])
def test_a_slot_that_is_free_can_not_be_given(slots: list[int]) -> None:
    """2 was returned, 3 was never taken, 0 comes twice: each would go to two turns."""
    pool = SlotPool("kv", 4)
    pool.take(3)
    pool.give([2])
    with pytest.raises(InvariantViolated, match="invariant 1: kv"):
        pool.give(slots)
    assert (pool.free, pool.free_slots()) == (2, [2, 3]), "nothing was returned"
    pool.give([0, 1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("slot", [1, 2, -1])
def test_one_slot_that_is_free_can_not_be_given(slot: int) -> None:
    pool = SlotPool("state", 3)
    pool.take(2)
    pool.give_one(1)
    with pytest.raises(InvariantViolated, match="invariant 1: state"):
        pool.give_one(slot)
    assert (pool.free, pool.take_one(), pool.take_one()) == (2, 1, 2)
