"""This module checks the cache's invariants from scratch. Numbers are those of docs/invariants.md.

Reads everything and trusts no counter: what the hot path keeps incrementally is counted again
here. O(cache), for tests and for an operator's `check`.
"""

from __future__ import annotations

from collections import Counter

from ownerserve.cache.parts import Parts
from ownerserve.cache.pools.slot_pools import SlotPool
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.prefix import TOKEN_BYTES


def require(holds: object, number: int, problem: str) -> None:
    """Raise InvariantViolated naming invariant `number` unless `holds`."""
    if not holds:
        raise InvariantViolated(f"invariant {number}: {problem}")


def check(parts: Parts) -> None:
    """Check every invariant of a cache; raise InvariantViolated at the first that does not hold."""
    nodes = list(prefix_tree.nodes(parts.tree.root))
    check_conservation(parts, nodes)
    check_turns(parts)
    check_locks(parts, nodes)
    check_lends(parts, nodes)
    check_structure(parts, nodes)
    check_running(parts)
    check_sessions(parts, nodes)
    check_evictable(parts, nodes)
    check_tails(parts, nodes)


def check_conservation(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 1: every slot of every pool is in exactly one place."""
    pools, runs = parts.pools, parts.running.values()
    blocks = [slot for node in nodes for slot in node.blocks]
    require(len(blocks) == parts.tree.blocks, 1, "the tree's block count is off")
    depths = sum(sum(range(node.start, node.end)) for node in nodes)
    require(depths == parts.tree.depths, 1, "the sum of the blocks' depths is off")
    blocks += [slot for run in runs for slot in run.row[run.sealed :]]
    blocks += parts.ingest.block_slots() + parts.lends.withheld()
    _check_pool(pools.blocks, blocks)
    for index, pool in enumerate(pools.points):
        slots = [
            slot
            for node in nodes
            for stop in node.stops
            for slot in (stop.slots or ())[index : index + 1]
            if slot is not None
        ]
        _check_pool(pool, slots + parts.ingest.point_slots(index))
    _check_pool(pools.states, [run.table.state for run in runs])


def _check_pool(pool: SlotPool, used: list[int]) -> None:
    places = Counter(used)
    places.update(pool.free_slots())
    twice = [slot for slot, count in places.items() if count > 1]
    require(not twice, 1, f"{pool.name}: slots {twice[:5]} are in two places")
    require(len(places) == pool.capacity, 1, f"{pool.name}: {len(places)} of {pool.capacity}")
    require(len(used) == pool.used, 1, f"{pool.name}: {pool.used} counted as used")


def check_turns(parts: Parts) -> None:
    """Check invariant 3: every turn that was begun is running, or has ended one way."""
    counters = parts.counters
    ended = counters.turns_finished + counters.turns_aborted
    require(counters.turns_begun == ended + len(parts.running), 3, "a turn has vanished")


def check_locks(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 5: the tree's locks are exactly the live receipts, and children hold
    parents.
    """
    receipts = [run.lock for run in parts.running.values()]
    receipts += [session.pin for session in parts.sessions if session.pin is not None]
    receipts += parts.ingest.locks()
    receipts += [lock for ticket in parts.lends for lock in ticket.locks]
    expected: dict[int, Counter[int]] = {id(node): Counter() for node in nodes}
    for receipt in receipts:
        require(not receipt.is_spent, 5, "a spent receipt is still held")
        if receipt.node.parent is not None:
            require(id(receipt.node) in expected, 7, "a lock is on an interval that is gone")
            expected[id(receipt.node)][receipt.depth] += 1
    for node in reversed(nodes):  # children before parents
        if expected[id(node)] and node.parent is not None and node.parent.parent is not None:
            expected[id(node.parent)][node.start] += 1
    protected = 0
    for node in nodes:
        require(node.pins == dict(expected[id(node)]), 5, f"pins {node.pins} at {node.start}")
        require(node.pinned == max(node.pins, default=node.start), 5, "pinned depth is off")
        require(node.pinned <= node.end, 7, "a running turn's path was trimmed")
        protected += node.pinned - node.start
    require(protected == parts.tree.protected, 5, "the count of protected blocks is off")


def check_lends(parts: Parts, nodes: list[Node]) -> None:
    """Check invariants 1, 5: what a ticket withholds waits for it, what it holds is in the tree,
    and one that follows a turn keeps the path that the turn has sealed.
    """
    tickets = list(parts.lends)
    waiting = {slot for ticket in tickets for slot in ticket.withheld}
    require(waiting == set(parts.lends.withheld()), 1, "a block waits for a ticket that is over")
    held = Counter(id(stop) for ticket in tickets for stop in ticket.points)
    for node in nodes:
        for stop in node.stops:
            require(stop.holds == held.pop(id(stop), 0), 5, f"{stop.holds} holds at {stop.depth}")
            require(not stop.holds or stop.is_complete, 5, "point state that is held went")
    require(not held, 5, "a ticket holds point state that is not in the tree")
    for ticket in tickets:
        if ticket.turn_id is not None:
            run = parts.running.get(ticket.turn_id)
            require(run is not None, 5, "a ticket follows a turn that has ended")
            at = ticket.locks[0]
            require(run is None or at.depth == run.sealed, 5, "a ticket lags behind its turn")


def check_structure(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 9: the tree is one: keys fit blocks, branches part from what they hang on,
    stops stand in their interval, in order.
    """
    size = parts.tree.block_bytes
    for node in nodes:
        require(node.blocks and node.is_live, 9, "an empty interval hangs in the tree")
        require(len(node.keys) == len(node.blocks) * size, 9, "keys do not fit blocks")
        top = max(node.branches, default=node.start)
        require(node.branch_top == top, 9, "the deepest branch is off")
        for depth, hanging in node.branches.items():
            require(node.start < depth <= node.end, 9, f"a branch hangs outside at {depth}")
            at = (depth - node.start) * size
            onward = bytes(node.keys[at : at + size])
            for key, child in hanging.items():
                require(child.parent is node and child.start == depth, 9, "a branch is misplaced")
                require(key == child.keys[:size] and key != onward, 9, "two equal ways on")
        depths = [stop.depth for stop in node.stops]
        require(depths == sorted(set(depths)), 9, f"stops {depths} are out of order")
        require(all(node.start < d <= node.end for d in depths), 9, "a stop stands outside")
        require(all(stop.node is node for stop in node.stops), 9, "a stop has another home")


def check_running(parts: Parts) -> None:
    """Check invariant 7: a running turn's row begins with its locked path, slot by slot."""
    block, size = parts.layout.block_tokens, parts.tree.block_bytes
    for run in parts.running.values():
        require(run.lock.depth == run.sealed, 7, "a lock is not where the turn sealed to")
        path = prefix_tree.row(run.lock.node, run.sealed)
        require(run.row[: run.sealed] == path, 7, f"{run.turn_id}: the row left its path")
        require(all(slots is run.row for slots in run.table.range.values()), 7, "a stale table")
        unsealed = max(run.position - run.sealed * block, 0)
        require(len(run.tail) == unsealed * 4 and len(run.tail) < size, 7, "the tail is off")
        require(run.position <= len(run.row) * block, 7, "tokens without a slot")


def check_sessions(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 6: sessions own nothing. Each frontier is a stop of the tree; counts are by
    sight.
    """
    anchored = {
        name: stop for node in nodes for stop in node.stops for name in (stop.anchors or {})
    }
    running = Counter(id(run.session) for run in parts.running.values() if run.session)
    for session in (*parts.sessions, *parts.sessions.expected.values()):
        stop = anchored.pop(session.session_id, None)
        require(stop is session.stop, 6, "a session stands at a stop that is not in the tree")
        if stop is not None and session.row is not None:
            path = prefix_tree.row(stop.node, stop.depth)
            require(session.row[: stop.depth] == path, 6, "a session's row left its path")
        require(session.running == running[id(session)], 6, "running turns are miscounted")
        require(session.depth <= session.sealed, 6, "more is resident than was sealed")
    require(not anchored, 6, f"frontiers of forgotten sessions: {list(anchored)[:5]}")
    for node in nodes:
        for stop in node.stops:
            standing = (stop.anchors or {}).values()
            live = sum(session.is_referenced for session in standing)
            live += sum(session.more_refs for session in standing)
            require(stop.refs == live, 6, f"{stop.refs} soft references counted, {live} live")


def check_evictable(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 7: the evictor finds everything under no lock, so the pool can't deadlock."""
    known = {id(node) for node in parts.tree.exposed}
    for node in nodes:
        if node.end > node.floor:
            require(node.stops and node.stops[-1].depth == node.end, 7, "a free tail has no stop")
            found = node.queued is not None or id(node) in known
            require(found, 7, f"the evictor can't find a free tail at {node.end}")
        for stop in node.stops:
            for index, slot in enumerate(stop.slots or ()):
                queued = stop.queued is not None and stop.queued[index] is not None
                queued = queued or stop.is_cooled or stop.holds > 0
                require(slot is None or queued, 7, "the evictor can't find a point")


def check_tails(parts: Parts, nodes: list[Node]) -> None:
    """Check invariant 12: each token of a running turn is in a finalized entry or waits, and what
    waits is not sealed; where state is kept nothing waits.
    """
    layout = parts.layout
    block = layout.block_tokens
    for run in parts.running.values():
        book = run.table.tails
        require(book.position == run.position, 12, f"{run.turn_id}: the tails are elsewhere")
        require(book.tails == layout.tails, 12, f"{run.turn_id}: tails of another layout")
        for tail in layout.tails:
            waiting, entries = book.waiting[tail.name], book.entries[tail.name]
            held = entries * tail.period + waiting
            require(held == run.position, 12, f"{tail.name}: {held} tokens of {run.position}")
            require(0 <= waiting < tail.period, 12, f"{tail.name}: {waiting} tokens wait")
            room = len(run.row) * block // tail.period
            require(entries <= room, 12, f"{tail.name}: an entry without a slot")
            if run.position >= run.sealed * block:  # else a replay: its blocks stay sealed
                unsealed = len(run.tail) // TOKEN_BYTES
                require(waiting <= unsealed, 12, f"{tail.name}: a sealed token waits")
    for node in nodes:
        for stop in node.stops:
            if stop.slots is not None:
                needed = layout.needed_at(stop.depth * block)
                require(needed == layout.point_names, 12, f"{needed} are needed at a boundary")
