"""The evictor chooses what goes, in the policy's order, and says what that freed.

Owns the lazy heaps. Range blocks go from the tail of an interval, one or a run at a time, just as
many as are needed; point state goes one component of one stop at a time. Never touches a block
below a lock or a branch. Decides alone: freeing the slots is the caller's.

A heap entry is a promise to look: its key may be too low by now (keys rise with use), then the
entry is put back under the present key. Whatever lowers a key calls `tree.expose`, `tree.cool` or
`offer`; only the tail being trimmed may stand too high, and that is the top already.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import Victim
from ownerserve.cache.policies.base import EvictionPolicy, PolicyPrices
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Freed, Key, Node, PrefixTree, ResumeDepth

GOES_FIRST = -inf
"""What was let go has this key, which lies before any policy's."""

LOOK_TAILS = 32
"""Entries of the order that a look at what goes next takes; what follows them costs as much."""

LEAST_IDLE_S = 0.1
"""State that was used less long ago counts as idle for so long."""

SMALL_HEAP = 256
"""Heaps up to this length are not worth cleaning of entries that are out of date."""


class EvictionCandidate:
    """An eviction candidate is what a policy sees: the blocks of an interval behind its last but
    one stop, or the point state of a stop. One object is re-used for all questions.
    """

    __slots__ = (
        "freed_bytes", "heat", "is_backed", "is_point", "lost_tokens", "position",
        "trimmed_tokens",
    )  # fmt: skip

    heat: ResumeDepth
    is_point: bool
    position: int
    trimmed_tokens: int
    is_backed: bool
    lost_tokens: int
    """Tokens from the last restorable point before this one; none if this is not one."""
    freed_bytes: int
    """A point's slots; for a tail those and the blocks back to the stop before."""


class Evictor:
    """The evictor keeps lazy heaps over the tree's free tails and its point state."""

    def __init__(self, tree: PrefixTree, layout: Layout, policy: EvictionPolicy) -> None:
        self.tree = tree
        self.policy = policy
        self.block_tokens = layout.block_tokens
        sizes = {component.name: component.slot_bytes for component in layout.components}
        self.block_bytes = sum(sizes[name] for name in layout.range_names)
        self.point_bytes = [sizes[name] for name in layout.point_names]
        self._tails: list[tuple[Key, int, Node]] = []
        self._points: list[list[tuple[Key, int, ResumeDepth]]] = [[] for _ in self.point_bytes]
        self._tails_limit = SMALL_HEAP
        self._points_limit = [SMALL_HEAP] * len(self.point_bytes)
        self._pushes = 0
        self._view = EvictionCandidate()

    def reprice(self, prices: PolicyPrices) -> None:
        """Order by measured costs from now on."""
        self.policy.reprice(prices)

    # -- what the candidate view asks ----------------------------------------------------------

    def segment_floor(self, node: Node) -> int:
        """Return the depth where the run of blocks that share the last stop's fate begins."""
        stops = node.stops
        floor = node.pinned if node.pinned > node.branch_top else node.branch_top
        return stops[-2].depth if len(stops) > 1 and stops[-2].depth > floor else floor

    def restorable_before(self, stop: ResumeDepth) -> int:
        """Return the depth to go on from if `stop` goes; its own when it is no restorable point."""
        if not self.point_bytes:
            return self.segment_floor(stop.node)
        if not stop.is_complete:
            return stop.depth
        before = prefix_tree.complete_stop(stop.node, stop.depth - 1)
        return before.depth if before else 0

    # -- range blocks --------------------------------------------------------------------------

    def evict_blocks(self, need: int) -> Freed:
        """Free exactly `need` blocks. The caller has seen that so many are evictable."""
        heap, tree, policy = self._tails, self.tree, self.policy
        freed = Freed([], [])
        while need:
            if tree.exposed:
                self._look_at_exposed()
            key, _, node = heap[0]
            stops, end = node.stops, node.start + len(node.blocks)
            floor = node.pinned if node.pinned > node.branch_top else node.branch_top
            if not node.is_live or key is not node.queued or end <= floor:
                if key is node.queued:
                    node.queued = None
                heappop(heap)
                continue
            present = self._tail_key(stops[-1], node)
            if present > key:
                node.queued = present
                heapreplace(heap, (present, self._next(), node))
                continue
            if len(stops) > 1 and stops[-2].depth > floor:
                floor = stops[-2].depth  # below it another stop's heat counts
            count = min(need, end - floor)
            tree.trim(node, count, freed)  # what is left stays the heap's top
            if present[0] != GOES_FIRST:
                policy.evicted(present)
            need -= count
        return freed

    def next_tails(self, need: int) -> list[Victim]:
        """Tell what `evict_blocks(need)` would take as the order stands now, and evict nothing.

        Looks at `LOOK_TAILS` entries at most, however large the tree is, and at one stretch of
        each interval: entries whose worth has risen since they were made come too early.
        """
        if self.tree.exposed:
            self._look_at_exposed()
        heap, found = self._tails, list[Victim]()
        front = [(heap[0], 0)] if heap else []
        for _ in range(LOOK_TAILS):
            if need <= 0 or not front:
                break
            (key, _, node), index = heappop(front)
            for below in (2 * index + 1, 2 * index + 2):
                if below < len(heap):
                    heappush(front, (heap[below], below))
            if node.is_live and key is node.queued and node.end > node.floor:
                found.append(self._victim(node, need))
                need -= found[-1].blocks
        return found

    def next_intervals(self, need: int, *, most: int) -> list[tuple[Node, int]]:
        """Return the intervals that would lose their tails if `need` blocks went, in that order,
        and the depth that each would lose all behind: those that are looked at with `most` entries
        of the order. Evicts nothing.

        As `evict_blocks` does it puts entries that are out of date where they belong now, so the
        order is the true one, and what that costs is spared later.
        """
        heap, found = self._tails, list[tuple[Node, int]]()
        looked: list[tuple[Key, int, Node]] = []
        if self.tree.exposed:
            self._look_at_exposed()
        for _ in range(most):
            if need <= 0 or not heap:
                break
            key, _, node = entry = heap[0]
            end = node.end
            if not node.is_live or key is not node.queued or end <= node.floor:
                if key is node.queued:
                    node.queued = None
                heappop(heap)
                continue
            present = self._tail_key(node.stops[-1], node)
            if present > key:
                node.queued = present
                heapreplace(heap, (present, self._next(), node))
                continue
            looked.append(entry)
            heappop(heap)
            cold = _cold_from(node)
            found.append((node, cold))
            need -= end - cold
        for entry in looked:
            heappush(heap, entry)
        return found

    def _victim(self, node: Node, need: int) -> Victim:
        """Describe up to `need` blocks of what shares the fate of the interval's last stop."""
        stop = node.stops[-1]
        blocks = min(need, stop.depth - self.segment_floor(node))
        lost = stop.depth - self.restorable_before(stop) if self.point_bytes else blocks
        at, size = stop.depth * self.block_tokens, self.block_tokens
        return Victim(blocks, at, lost * size, self._is_tail_backed(stop), stop.refs > 0)

    def _is_tail_backed(self, stop: ResumeDepth) -> bool:
        """Tell whether what goes with the tail that ends at `stop` can be loaded: its blocks, and
        its point state where there is any."""
        return stop.is_stored and (stop.slots is None or bool(stop.backed))

    def _look_at_exposed(self) -> None:
        exposed, heap = self.tree.exposed, self._tails
        while exposed:
            node = exposed.pop()
            node.is_exposed = False
            floor = node.pinned if node.pinned > node.branch_top else node.branch_top
            if not node.is_live or node.start + len(node.blocks) <= floor:
                continue
            present = self._tail_key(node.stops[-1], node)
            if node.queued is None or present < node.queued:
                node.queued = present
                heappush(heap, (present, self._next(), node))
        if len(heap) > self._tails_limit:
            heap[:] = [entry for entry in heap if entry[0] is entry[2].queued]
            heapify(heap)
            self._tails_limit = 2 * len(heap) + SMALL_HEAP

    def _tail_key(self, stop: ResumeDepth, node: Node) -> Key:
        """Return the key of the blocks of `node` behind its last but one stop; `stop` is its
        last."""
        if stop.is_let_go:
            return (GOES_FIRST,)
        view, tokens, depth = self._view, self.block_tokens, stop.depth
        blocks = depth - self.segment_floor(node)
        view.heat, view.is_point, view.is_backed = stop, False, self._is_tail_backed(stop)
        view.position, view.trimmed_tokens = depth * tokens, stop.trimmed * tokens
        freed = blocks * self.block_bytes
        if self.point_bytes:
            view.lost_tokens = (depth - self.restorable_before(stop)) * tokens
            freed += self._held_bytes(stop)
        else:
            view.lost_tokens = blocks * tokens
        view.freed_bytes = freed or 1
        return self.policy.key(view)

    def _held_bytes(self, stop: ResumeDepth) -> int:
        """Count the bytes of point state at `stop`."""
        held = 0
        for slot, size in zip(stop.slots or (), self.point_bytes, strict=False):
            held += size if slot is not None else 0
        return held

    def _next(self) -> int:
        self._pushes += 1
        return self._pushes

    # -- what goes next, as a price -------------------------------------------------------------

    def front_worth(self, now: float) -> tuple[float, float]:
        """Return what the blocks that go next are worth, and the point state that does: tokens to
        compute again for each byte, divided by the seconds that nobody came for it; 0 when none can
        go."""
        return self._tail_worth(now), self._point_worth(now)

    def _tail_worth(self, now: float) -> float:
        if self.tree.exposed:
            self._look_at_exposed()
        heap = self._tails
        while heap:
            key, _, node = heap[0]
            if not node.is_live or key is not node.queued or node.end <= node.floor:
                if key is node.queued:
                    node.queued = None
                heappop(heap)
                continue
            present = self._tail_key(node.stops[-1], node)
            if present <= key:
                return self._worth(now)
            node.queued = present
            heapreplace(heap, (present, self._next(), node))
        return 0.0

    def _point_worth(self, now: float) -> float:
        stop = self._next_point(0) if self._points else None
        if stop is None:
            return 0.0
        self._lost_key(stop)
        return self._worth(now)

    def _worth(self, now: float) -> float:
        view = self._view
        idle_s = max(now - view.heat.last_s, LEAST_IDLE_S)
        return view.lost_tokens / view.freed_bytes / idle_s

    # -- point state ---------------------------------------------------------------------------

    def offer(self, stop: ResumeDepth) -> None:
        """Queue the point state of `stop`, which is new or became worth less."""
        if stop.slots is None:
            return
        if stop.queued is None:
            stop.queued = [None] * len(self.point_bytes)
        present = self._point_key(stop)
        for index, slot in enumerate(stop.slots):
            queued = stop.queued[index]
            if slot is not None and (queued is None or present < queued):
                stop.queued[index] = present
                heappush(self._points[index], (present, self._next(), stop))
                if len(self._points[index]) > self._points_limit[index]:
                    self._compact(index)

    def _compact(self, index: int) -> None:
        """Forget entries of state that is gone: decode leaves one behind every B tokens."""
        heap = self._points[index]
        heap[:] = [
            entry
            for entry in heap
            if entry[2].slots is not None
            and entry[2].queued is not None
            and entry[0] is entry[2].queued[index]
        ]
        heapify(heap)
        self._points_limit[index] = 2 * len(heap) + SMALL_HEAP

    def next_points(self, limit: int) -> list[ResumeDepth]:
        """List the stops with point state that are about to go: the heads of the heaps, `limit`
        entries of each. O(limit), however large the tree is."""
        self.look_at_cooled()
        heads = (entry[2] for heap in self._points for entry in heap[:limit])
        return list({id(stop): stop for stop in heads if stop.slots is not None}.values())

    def look_at_cooled(self) -> None:
        """Put what the tree hands over into the heaps, under its key of now.

        Called when a turn has ended: its session stands at the new state, whose key is what it
        will be until somebody comes back. Queued any earlier, all of it would have to be put back
        under a higher key when room is short, which is the wrong moment.
        """
        cooled = self.tree.cooled
        while cooled:
            cooled[-1].is_cooled = False
            self.offer(cooled.pop())

    def evict_point(self, index: int) -> Freed | None:
        """Free one slot of point component `index`; None when every one is held."""
        victim = self._next_point(index)
        if victim is None:
            return None
        assert victim.queued is not None
        victim.queued[index] = None
        heappop(self._points[index])
        return self.drop_component(victim, index)

    def _next_point(self, index: int) -> ResumeDepth | None:
        """Return the stop whose component goes next, which is its heap's top then."""
        self.look_at_cooled()
        heap = self._points[index]
        while heap:
            key, _, stop = heap[0]
            queued = stop.queued
            if stop.slots is None or queued is None or key is not queued[index]:
                heappop(heap)
                continue
            if stop.slots[index] is None or stop.holds:
                queued[index] = None  # what is held is offered again when its lend is over
                heappop(heap)
                continue
            present = self._point_key(stop)
            if present <= key:
                return stop
            queued[index] = present
            heapreplace(heap, (present, self._next(), stop))
        return None

    def drop_component(self, stop: ResumeDepth, index: int) -> Freed:
        """Take one point component off a stop."""
        assert stop.slots is not None
        lost = stop.is_complete
        gone: list[int | None] = [None] * len(stop.slots)
        gone[index] = stop.slots[index]
        freed = Freed([], [gone], int(lost))
        if lost and not stop.is_let_go:
            self.policy.evicted(self._lost_key(stop))
        stop.slots[index] = None
        if self.tree.slid is not None and stop.anchors:
            self.tree.slid.add(stop)
        if all(slot is None for slot in stop.slots):
            stop.slots = None
            self.tree.prune(stop)
        else:
            self.offer(stop)  # incomplete now: the rest of it goes first
        self.tree.expose(stop.node)
        return freed

    def _point_key(self, stop: ResumeDepth) -> Key:
        """Return the key of a stop's point state. What is incomplete goes first: it restores
        nothing."""
        if stop.is_let_go:
            return (GOES_FIRST,)
        return (float(stop.is_complete), *self._lost_key(stop))

    def _lost_key(self, stop: ResumeDepth) -> Key:
        """Return the policy's key of point state by itself."""
        view, tokens, depth = self._view, self.block_tokens, stop.depth
        view.heat, view.is_point, view.is_backed = stop, True, bool(stop.backed)
        view.position, view.trimmed_tokens = depth * tokens, stop.trimmed * tokens
        view.lost_tokens = (depth - self.restorable_before(stop)) * tokens
        view.freed_bytes = self._held_bytes(stop) or 1
        return self.policy.key(view)


def _cold_from(node: Node) -> int:
    """Return the depth behind which all of an interval goes when its last stop does: its floor, or
    a stop that was used later, to which the heat of those behind it slides down."""
    floor, last = node.floor, node.stops[-1]
    for stop in reversed(node.stops):
        if stop.depth <= floor:
            break
        if stop.last_s > last.last_s or stop.refs > last.refs:
            return stop.depth
    return floor
