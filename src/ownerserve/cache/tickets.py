"""A ticket is one lend, and the places of what it covers can be looked up, as can what there is to
lend of a turn that runs. Nothing here changes anything: `lends` gives tickets, and ends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ownerserve.cache.sessions import Running
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Receipt, ResumeDepth
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed


class Ticket(msgspec.Struct, eq=False):
    """A ticket stands until `until_s`, which each read puts off to `idle_s` after it.

    `locks` keep paths, one for each prefix that was lent, and `points` their point state; `turn_id`
    is the running turn that it follows, if any, whose path is the first of the locks. `withheld`
    are blocks which that turn gave back, the last of them (from `tail` on) those that came behind
    its sealed path when it ended.
    """

    number: int
    idle_s: float
    until_s: float
    locks: list[Receipt]
    points: list[ResumeDepth]
    turn_id: TurnId | None = None
    withheld: list[int] = []
    tail: int = 0


class LentPlaces:
    """`LentPlaces` say in which slots lies what the standing tickets of one cache cover, and what
    its running turns have sealed."""

    def __init__(
        self,
        standing: Mapping[int, Ticket],
        withheld: Iterable[int],
        running: Mapping[TurnId, Running],
        *,
        point_names: tuple[str, ...],
        block_bytes: int,
    ) -> None:
        """Take what `Lends` keep, by reference: tickets by number, and the blocks that wait."""
        self._standing = standing
        self._withheld = withheld
        self._running = running
        self._point_names = point_names
        self._block_bytes = block_bytes

    def sealed_of(self, session_id: SessionId) -> Packed:
        """Return the tokens that a running turn of the session has sealed, which can be lent by
        what they are; of several turns, of the one with most. None: no turn of it runs."""
        runs = (
            run
            for run in self._running.values()
            if run.session is not None and run.session.session_id == session_id
        )
        run = max(runs, key=lambda one: one.sealed, default=None)
        if run is None:
            return b""
        size = self._block_bytes
        return prefix_tree.tokens(run.lock.node, 0, run.sealed, block_bytes=size)

    def blocks_of(self, number: int, first: int, end: int, *, prefix: int = 0) -> list[int]:
        """Return the slots, the same in every range component, of blocks [first, end) of the
        ticket's `prefix`-th prefix: as many of them as it covers, none when it is over.

            of a turn that is followed    |== sealed path ==|-- private --|    its present row
            of one that has ended         |== sealed path ==|-- withheld -|    its last row
        """
        ticket = self._standing.get(number)
        if ticket is None or not 0 <= prefix < len(ticket.locks):
            return []
        lock = ticket.locks[prefix]
        if ticket.turn_id is not None and not prefix:
            return self._running[ticket.turn_id].row[first:end]
        row = prefix_tree.row(lock.node, lock.depth)
        if not prefix:
            row += ticket.withheld[ticket.tail :]
        return row[first:end]

    def points_of(self, number: int, *, prefix: int = 0) -> dict[int, dict[str, int]]:
        """Return the point state that the ticket holds on its `prefix`-th prefix: by depth, in
        blocks, the slot of each component."""
        ticket = self._standing.get(number)
        if ticket is None or not 0 <= prefix < len(ticket.locks):
            return {}
        lock = ticket.locks[prefix]
        return {
            stop.depth: stop.point_slots(self._point_names)
            for stop in ticket.points
            if stop.depth <= lock.depth and prefix_tree.locate(lock.node, stop.depth) is stop.node
        }

    def covers_beyond(self, limit: int) -> bool:
        """Tell whether somebody may be reading a block whose slot is `limit` or more."""
        if max(self._withheld, default=-1) >= limit:
            return True
        for ticket in self._standing.values():
            run = None if ticket.turn_id is None else self._running[ticket.turn_id]
            rows = [prefix_tree.row(lock.node, lock.depth) for lock in ticket.locks]
            rows.append([] if run is None else run.row)
            if any(max(row, default=-1) >= limit for row in rows):
                return True
        return False
