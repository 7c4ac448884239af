"""Lends say who may read blocks and point state, and until when. They own the tickets, and the
blocks that wait for one before they return to their pool.

    lend, follow ──> STANDS ── end ──────────────> over: a reader is done
                     │  ^   `─ expire ───────────> over: nobody read for `idle_s`
                     read      room.revoke_for ──> over: a turn needed what it kept

A ticket is a lock on a sealed path and a hold on point state there. One on a running turn follows
it as it seals, and covers its private blocks too, for who reads them layer by layer: those that the
turn gives back (aborted, preempted, finished, spares of a duplicate seal) wait for the ticket. A
turn that was preempted and begins again is followed again.
A fork adds a lock of its own, and no ticket follows it.

A reader asks after each read, and what was read counts only if the ticket stood: `read` on the
cache's thread, `stands` on any other. A turn that finds no room revokes tickets, the oldest first
(lent_room). Whoever runs the cache calls `expire` when `next_due` has come, also while it is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf

from ownerserve.cache.lent_room import LentRoom
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.sessions import Running
from ownerserve.cache.tickets import LentPlaces, Ticket
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, ResumeDepth
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import Packed


class Lends:
    """Lends are the tickets of one cache, in the order they were given."""

    def __init__(
        self, tree: PrefixTree, pools: SlotPools, running: Mapping[TurnId, Running]
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._running = running
        self._standing: dict[int, Ticket] = {}
        self._following: dict[TurnId, list[Ticket]] = {}
        self._withheld: Counter[int] = Counter()  # how many tickets each block waits for
        self.places = LentPlaces(
            self._standing,
            self._withheld,
            running,
            point_names=pools.layout.point_names,
            block_bytes=tree.block_bytes,
        )
        self.room = LentRoom(
            tree, pools, self._standing, self._withheld, end=self.end, expire=self.expire
        )
        self._numbers = 0
        self._next_end_s = inf  # no ticket ends before

    def __len__(self) -> int:
        return len(self._standing)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._standing.values())

    # -- a reader's calls ----------------------------------------------------------------------

    def lend(self, prefixes: Iterable[Packed], now: float, *, idle_s: float) -> int:
        """Lend what of each prefix is resident, in whole blocks, and the point state to go on from
        at its end or before; of no prefix: nothing until a turn is followed. Returns the ticket's
        number; it stands `idle_s` without a read."""
        size = self._tree.block_bytes
        ends = [self._tree.walk(prefix, len(prefix) // size) for prefix in prefixes]
        return self._open(ends, now, idle_s).number

    def follow(self, number: int, turn_id: TurnId) -> None:
        """Have a ticket follow a turn that runs now: its path, its private blocks, and the point
        state that it keeps up to its prompt's end, and at its own. What the ticket covered before
        it keeps. One that is over is no error.

        Raises InvalidInput when the turn is not running.
        """
        ticket, run = self._standing.get(number), self._running.get(turn_id)
        if run is None:
            raise InvalidInput("turn_id", f"{turn_id!r} is not running", "lend its prefix")
        if ticket is None or ticket.turn_id == turn_id:
            return
        ticket.locks.insert(0, self._tree.lock(run.lock.node, run.sealed))
        self._hold(ticket, prefix_tree.complete_stop(run.lock.node, run.sealed))
        ticket.turn_id = turn_id
        self._following.setdefault(turn_id, []).append(ticket)

    def _open(self, ends: list[tuple[Node, int]], now: float, idle_s: float) -> Ticket:
        self._numbers += 1
        locks = [self._tree.lock(node, depth) for node, depth in ends]
        ticket = Ticket(self._numbers, idle_s, now + idle_s, locks, [])
        for node, depth in ends:
            self._hold(ticket, prefix_tree.complete_stop(node, depth))
        self._standing[ticket.number] = ticket
        self._next_end_s = min(self._next_end_s, ticket.until_s)
        return ticket

    def read(self, number: int, now: float) -> bool:
        """Tell whether the ticket stands, so that what was read until now is what was lent; then it
        stands for `idle_s` more."""
        ticket = self._standing.get(number)
        if ticket is None or ticket.until_s <= now:
            return False
        ticket.until_s = now + ticket.idle_s
        return True

    def stands(self, number: int) -> bool:
        """Tell whether the ticket is not over yet. Any thread may ask, and it puts nothing off.

        A reader on another thread asks behind each read: True, and all that it read until it asked
        is what was lent. A ticket leaves the table before anything that it kept is given back
        (`end`), and looking a number up in the table is one step that no other thread cuts in two.
        """
        return number in self._standing

    def end(self, number: int) -> None:
        """Let go what the ticket kept: its reader is done. One that is over already is no error."""
        ticket = self._standing.pop(number, None)  # before all else: other threads ask `stands`
        if ticket is None:
            return
        for stop in ticket.points:
            stop.holds -= 1
            self._tree.cool(stop)
        for lock in ticket.locks:
            self._tree.unlock(lock)
        if ticket.turn_id is not None:
            followers = self._following[ticket.turn_id]
            followers.remove(ticket)
            if not followers:
                del self._following[ticket.turn_id]
        self._withheld.subtract(ticket.withheld)
        free = [slot for slot in ticket.withheld if not self._withheld[slot]]
        for slot in free:
            del self._withheld[slot]
        self._pools.blocks.give(free)

    # -- room ----------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return when `expire` has something to look at next; None: no ticket stands."""
        return None if self._next_end_s == inf else self._next_end_s

    def expire(self, now: float) -> None:
        """End the tickets whose time is over. O(1) while none can be."""
        if now < self._next_end_s:
            return
        for number in [n for n, one in self._standing.items() if one.until_s <= now]:
            self.end(number)
        self._next_end_s = min((one.until_s for one in self._standing.values()), default=inf)

    # -- what a turn does ----------------------------------------------------------------------

    def sealed(self, run: Running, spares: list[int]) -> None:
        """Follow a turn whose lock has moved, and take back `spares`, private blocks of which the
        tree had another's already."""
        if spares:
            self._give_back(run, spares)
        for ticket in self._following.get(run.turn_id, ()):
            self._tree.relock(ticket.locks[0], run.lock.node, run.lock.depth)

    def kept(self, turn_id: TurnId, stop: ResumeDepth | None) -> None:
        """Hold point state that a turn keeps, where somebody follows it."""
        for ticket in self._following.get(turn_id, ()):
            self._hold(ticket, stop)

    def left(self, run: Running) -> None:
        """Take back the private blocks of a turn that has ended. Its tickets follow it no longer:
        what they cover stays as it is."""
        self._give_back(run, run.row[run.sealed :])
        followers = self._following.pop(run.turn_id, ())
        for ticket in followers:
            self._hold(ticket, prefix_tree.complete_stop(run.lock.node, run.sealed))
            ticket.turn_id = None
            ticket.tail = len(ticket.withheld) - (len(run.row) - run.sealed)

    def _give_back(self, run: Running, blocks: list[int]) -> None:
        """Return private blocks to their pool, or have them wait for who reads them."""
        followers = self._following.get(run.turn_id)
        if followers is None:
            self._pools.blocks.give(blocks)
            return
        for ticket in followers:
            ticket.withheld = [*ticket.withheld, *blocks]
            self._withheld.update(blocks)

    def _hold(self, ticket: Ticket, stop: ResumeDepth | None) -> None:
        if stop is not None and stop not in ticket.points:
            stop.holds += 1
            ticket.points.append(stop)

    # -- what the checks and the metrics read --------------------------------------------------

    def withheld(self) -> list[int]:
        """List the blocks that no turn and no path has, which wait for a ticket's end."""
        return list(self._withheld)
