"""Slots of one component. Owns which are free; knows nothing of what the others hold."""

from __future__ import annotations

from collections import Counter

from ownerserve.kv.errors import CapacityExceeded, InvalidInput, InvariantViolated


class SlotPool:
    """`capacity` slots, numbered from 0. A bump pointer for slots never used, a list for returned
    ones: a pool of millions costs nothing until it is filled.

    A slot that is returned while it is free would be handed to two turns: `give` refuses it
    (invariant 1), at a look into a set for each slot.
    """

    __slots__ = ("_freed", "_is_freed", "_next", "capacity", "free", "name")

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 0:
            raise InvalidInput(f"slots[{name}]", f"{capacity} is negative", "use 0 or more")
        self.name = name
        self.capacity = capacity
        self.free = capacity
        self._next = 0
        self._freed: list[int] = []
        self._is_freed: set[int] = set()

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def take_one(self) -> int:
        """A slot. Raises CapacityExceeded when none is free."""
        freed = self._freed
        if freed:
            slot = freed.pop()
            self._is_freed.remove(slot)
        elif self._next < self.capacity:
            slot = self._next
            self._next += 1
        else:
            raise CapacityExceeded(f"{self.name}: a slot wanted, {self.free} free")
        self.free -= 1
        return slot

    def give_one(self, slot: int) -> None:
        """Return a slot. Raises InvariantViolated when it is free already."""
        if slot in self._is_freed or not 0 <= slot < self._next:
            self._refuse([slot])
        self._is_freed.add(slot)
        self._freed.append(slot)
        self.free += 1

    def take(self, count: int) -> list[int]:
        """`count` slots, returned ones first. Raises CapacityExceeded and takes none."""
        freed = self._freed
        have = len(freed)
        if count <= have:
            if not count:  # freed[-0:] would be the whole list
                return []
            taken = freed[-count:]
            del freed[-count:]
            self._is_freed.difference_update(taken)
            self.free -= count
            return taken
        fresh = count - have
        if self._next + fresh > self.capacity:
            raise CapacityExceeded(f"{self.name}: {count} slots wanted, {self.free} free")
        taken = freed[:]
        freed.clear()
        self._is_freed.clear()
        taken.extend(range(self._next, self._next + fresh))
        self._next += fresh
        self.free -= count
        return taken

    def give(self, slots: list[int]) -> None:
        """Return slots. Raises InvariantViolated, and returns none, when one is free already."""
        if not slots:
            return
        known, before = self._is_freed, len(self._is_freed)
        known.update(slots)
        if len(known) - before != len(slots) or min(slots) < 0 or max(slots) >= self._next:
            self._is_freed = set(self._freed)
            self._refuse(slots)
        self._freed += slots
        self.free += len(slots)

    def _refuse(self, slots: list[int]) -> None:
        times = Counter(slots)
        twice = sorted(s for s in times if times[s] > 1 or s in self._is_freed)
        never = sorted(s for s in times if not 0 <= s < self._next)
        raise InvariantViolated(
            f"invariant 1: {self.name}: slots {twice or never} are returned and are free already"
        )

    def free_slots(self) -> list[int]:
        """Every free slot by number: for checks, O(capacity)."""
        return self._freed + list(range(self._next, self.capacity))
