"""Free lists: the traps."""

from __future__ import annotations

import pytest

from ownerserve.cache.pool import SlotPool
from ownerserve.kv.errors import CapacityExceeded, InvalidInput


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
