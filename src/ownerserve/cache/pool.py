"""Slots of one component. Owns which are free; knows nothing of what the others hold."""

from __future__ import annotations

from ownerserve.kv.errors import CapacityExceeded, InvalidInput


class SlotPool:
    """`capacity` slots, numbered from 0. A bump pointer for slots never used, a list for returned
    ones: a pool of millions costs nothing until it is filled."""

    __slots__ = ("_freed", "_next", "capacity", "free", "name")

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 0:
            raise InvalidInput(f"slots[{name}]", f"{capacity} is negative", "use 0 or more")
        self.name = name
        self.capacity = capacity
        self.free = capacity
        self._next = 0
        self._freed: list[int] = []

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def take_one(self) -> int:
        """A slot. Raises CapacityExceeded when none is free."""
        freed = self._freed
        if freed:
            slot = freed.pop()
        elif self._next < self.capacity:
            slot = self._next
            self._next += 1
        else:
            raise CapacityExceeded(f"{self.name}: a slot wanted, {self.free} free")
        self.free -= 1
        return slot

    def give_one(self, slot: int) -> None:
        """Return a slot."""
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
            self.free -= count
            return taken
        fresh = count - have
        if self._next + fresh > self.capacity:
            raise CapacityExceeded(f"{self.name}: {count} slots wanted, {self.free} free")
        taken = freed[:]
        freed.clear()
        taken.extend(range(self._next, self._next + fresh))
        self._next += fresh
        self.free -= count
        return taken

    def give(self, slots: list[int]) -> None:
        """Return slots. Who gives must own them; invariant 1 finds a double return."""
        self._freed += slots
        self.free += len(slots)

    def free_slots(self) -> list[int]:
        """Every free slot by number: for checks, O(capacity)."""
        return self._freed + list(range(self._next, self.capacity))
