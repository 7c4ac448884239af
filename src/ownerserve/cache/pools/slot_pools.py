"""SlotPools are the pools, and make room in them. They own every slot that the tree or a turn does
not.

All range components are filled in lock-step, so one block number is the slot in each of their
pools; point components and state blocks have a pool each. Taking is all or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ownerserve.cache.counters import Counters, LossCause
from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import NoRoom, Shortage
from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.tree.prefix_tree import Freed, ResumeDepth
from ownerserve.kv.errors import CapacityExceeded, InvalidInput, InvariantViolated


class SlotPool:
    """A slot pool is `capacity` slots, numbered from 0: a bump pointer for slots never used, a list
    for returned ones, so that a pool of millions costs nothing until it is filled.

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
        """Count the slots that are not free."""
        return self.capacity - self.free

    def take_one(self) -> int:
        """Take a slot. Raises CapacityExceeded when none is free."""
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
        """Take `count` slots, returned ones first. Raises CapacityExceeded and takes none."""
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

    def grow(self, count: int) -> None:
        """Add `count` slots behind the last one."""
        self.capacity += count
        self.free += count

    def cut(self, limit: int) -> None:
        """Give up the slots from `limit` on, which are all free."""
        kept = [slot for slot in self._freed if slot < limit]
        fresh = max(0, limit - self._next)
        if self.used != min(self._next, limit) - len(kept):
            raise InvariantViolated(f"invariant 1: {self.name}: a slot from {limit} on is in use")
        self._freed, self._is_freed = kept, set(kept)
        self._next = min(self._next, limit)
        self.capacity, self.free = limit, len(kept) + fresh

    def take_below(self, limit: int, count: int) -> list[int]:
        """Take `count` slots below `limit`. Raises CapacityExceeded and takes none."""
        low = [slot for slot in self._freed if slot < limit][:count]
        fresh = list(range(self._next, min(limit, self._next + count - len(low))))
        if len(low) + len(fresh) < count:
            raise CapacityExceeded(f"{self.name}: {count} slots below {limit} wanted")
        self._is_freed.difference_update(low)
        self._freed = [slot for slot in self._freed if slot in self._is_freed]
        self._next += len(fresh)
        self.free -= count
        return low + fresh

    def _refuse(self, slots: list[int]) -> None:
        times = Counter(slots)
        twice = sorted(s for s in times if times[s] > 1 or s in self._is_freed)
        never = sorted(s for s in times if not 0 <= s < self._next)
        raise InvariantViolated(
            f"invariant 1: {self.name}: slots {twice or never} are returned and are free already"
        )

    def free_slots(self) -> list[int]:
        """List every free slot by number: for checks, O(capacity)."""
        return self._freed + list(range(self._next, self.capacity))


STATE_POOL = "state"


class ArenaSize(msgspec.Struct, frozen=True):
    """An arena's size is the bytes that range blocks and point slots share. There are
    `least_points` slots at least and `most_points` at most, and `most_blocks` blocks beside the
    least.
    """

    size_bytes: int
    least_points: int
    most_points: int
    most_blocks: int


class SlotPools:
    """SlotPools are the pools of one cache, with the evictor that refills them."""

    def __init__(
        self,
        layout: Layout,
        slots: Mapping[str, int],
        *,
        state_slots: int,
        evictor: Evictor,
        counters: Counters,
        least_points: int | None = None,
    ) -> None:
        names = {component.name for component in layout.components}
        if set(slots) != names:
            raise InvalidInput(
                "slots", f"names {sorted(slots)}", f"name each of {sorted(names)} once"
            )
        counts = {slots[name] for name in layout.range_names}
        if len(counts) != 1:
            sizes = {name: slots[name] for name in layout.range_names}
            raise InvalidInput(
                "slots",
                f"range components have {sizes}",
                "name at least one, and give all the same number: they fill in lock-step",
            )
        # All but `least_points` of the point slots may give way to blocks; None: none may.
        self.layout = layout
        self.blocks = SlotPool("range", counts.pop())
        self.points = [SlotPool(name, slots[name]) for name in layout.point_names]
        self.states = SlotPool(STATE_POOL, state_slots)
        self._evictor = evictor
        self._tree = evictor.tree
        self.counters = counters
        self._block_tokens = layout.block_tokens
        self._block_bytes = evictor.block_bytes
        self.arena = self._arena(least_points)

    def _arena(self, least_points: int | None) -> ArenaSize:
        points = min((pool.capacity for pool in self.points), default=0)
        least = points if least_points is None else min(points, least_points)
        point_bytes = sum(self._evictor.point_bytes)
        size = self.blocks.capacity * self._block_bytes + points * point_bytes
        return ArenaSize(
            size, least, points, (size - least * point_bytes) // max(1, self._block_bytes)
        )

    @property
    def most_blocks(self) -> int:
        """Count the range blocks that there can be, if point slots give way."""
        return self.arena.most_blocks

    def evictable_blocks(self) -> int:
        """Count the tree's blocks under no lock: all of them can go, leaf by leaf."""
        tree = self._tree
        return tree.blocks - tree.protected

    def obtainable_blocks(self) -> int:
        """Count the free blocks, those that can be evicted, and those for which point slots would
        give way."""
        tree, blocks = self._tree, self.blocks
        yielded = self.arena.most_blocks - blocks.capacity
        return blocks.free + tree.blocks - tree.protected + yielded

    def shortage(self, count: int) -> Shortage:
        """Tell what would go for `count` range blocks. O(1) while they are free, else bounded."""
        missing = count - self.blocks.free
        victims = tuple(self._evictor.next_tails(missing)) if missing > 0 else ()
        return Shortage(count, self.blocks.free, self._block_bytes, victims)

    def take_blocks(self, count: int) -> list[int] | NoRoom:
        """Take `count` range blocks and evict what is missing, or take and evict nothing."""
        missing = count - self.blocks.free
        if missing > 0:
            short = missing - self.evictable_blocks()
            if short > 0:
                self.counters.no_room += 1
                return NoRoom(self.blocks.name, short)
            self.evict_blocks(missing)
        return self.blocks.take(count)

    def evict_blocks(self, count: int) -> Freed:
        """Evict `count` blocks, which must be evictable, in one run."""
        freed = self._evictor.evict_blocks(count)
        self.blocks.give(freed.blocks)
        tokens = count * self._block_tokens
        counters = self.counters
        counters.evictions += 1
        counters.evicted_tokens += tokens
        counters.wanted_tokens += tokens
        counters.evicted_bytes += count * self._block_bytes
        if tokens > counters.largest_eviction_tokens:
            counters.largest_eviction_tokens = tokens
        if freed.points:
            self._give_points(freed, LossCause.RANGE_EVICTED)
        return freed

    def fill_point(self, stop: ResumeDepth) -> dict[str, int] | NoRoom:
        """Take the point slots that `stop` lacks; returns them by component name.

        May evict the state of other stops. When a pool has nothing to give, takes nothing.
        """
        lacking = stop.slots or [None] * len(self.points)
        wanted = [index for index, slot in enumerate(lacking) if slot is None]
        taken = self._take_point(wanted)
        if not isinstance(taken, NoRoom):
            self._hang(stop, taken)
        return taken

    def take_point(self) -> dict[str, int] | NoRoom:
        """Take one slot of every point component, for state that has no stop yet."""
        return self._take_point(list(range(len(self.points))))

    def _take_point(self, wanted: list[int]) -> dict[str, int] | NoRoom:
        pools = self.points
        for index in wanted:
            if pools[index].free:
                continue
            freed = self._evictor.evict_point(index)
            if freed is None:
                self.counters.points_lost[LossCause.NO_ROOM] += 1
                return NoRoom(pools[index].name, 1)
            self._give_points(freed, LossCause.POINT_EVICTED)
        return {pools[index].name: pools[index].take(1)[0] for index in wanted}

    def hang_point(self, stop: ResumeDepth, taken: dict[str, int]) -> None:
        """Put filled slots at a stop; those it has already are returned."""
        slots = stop.slots
        if slots is None:
            self._hang(stop, taken)
            return
        names = [pool.name for pool in self.points]
        has = {name for name, slot in zip(names, slots, strict=True) if slot is not None}
        lacks = {name: slot for name, slot in taken.items() if name not in has}
        self.give_point({name: slot for name, slot in taken.items() if name in has})
        self._hang(stop, lacks)

    def _hang(self, stop: ResumeDepth, taken: dict[str, int]) -> None:
        slots = stop.slots or [None] * len(self.points)
        stop.slots = [taken.get(p.name, s) for p, s in zip(self.points, slots, strict=True)]
        stop.backed = ()
        self._evictor.tree.cool(stop)

    def give_point(self, taken: dict[str, int]) -> None:
        """Return slots that are at no stop."""
        for pool in self.points:
            if pool.name in taken:
                pool.give([taken[pool.name]])

    def evict_points(self, index: int, count: int) -> int:
        """Free up to `count` slots of point component `index`; returns how many went."""
        for done in range(count):
            freed = self._evictor.evict_point(index)
            if freed is None:
                return done
            self._give_points(freed, LossCause.POINT_EVICTED)
        return count

    def drop_point(self, stop: ResumeDepth, reason: LossCause) -> None:
        """Free all point state of a stop."""
        for index, slot in enumerate(stop.slots or ()):
            if slot is not None:
                self._give_points(self._evictor.drop_component(stop, index), reason)

    def _give_points(self, freed: Freed, reason: LossCause) -> None:
        evicted = self.counters.evicted_points
        for slots in freed.points:
            for pool, slot in zip(self.points, slots, strict=True):
                if slot is not None:
                    pool.give([slot])
                    if reason is not LossCause.SUPERSEDED:
                        evicted[pool.name] = evicted.get(pool.name, 0) + 1
        if freed.points_lost:
            self.counters.points_lost[reason] += freed.points_lost
