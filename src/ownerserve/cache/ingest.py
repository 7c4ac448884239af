"""Ingest takes in state from outside: a transfer, a store, another worker. It is the one door, and
it verifies.

Owns the slots of arrivals that are not in the tree yet. Nothing becomes matchable before its
prefix hash and its digest are right (invariant 4).

    reserve -> RESERVED -- commit, all as stated ---> in the tree
                   |  `--- commit, anything else ---> slots free, counted as quarantined
                   `------ abort --------> HELD -- quiet --> slots free

An aborted arrival's slots stay on hold until its writer is proven quiet: a timeout is no proof
that a write has stopped. Who writes is the arrival's `writer`; each hold is counted under it, with
its age (`holds`). A hold that stays is memory lost to a writer that nobody has heard of since: it
is never given to others, and shows as the oldest age.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from ownerserve.cache.counters import Counters
from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefusal,
    CacheRefused,
    Inserted,
    NoRoom,
    SlotsReserved,
    Verified,
    WriterKind,
)
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, Receipt, ResumeDepth
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import hash_prefix


class Pending(msgspec.Struct, eq=False):
    """A pending arrival is one between reserve and commit, or on hold since `held_s` (`lock` is
    None then)."""

    arrival: Arrival
    lock: Receipt | None
    blocks: list[int]
    points: dict[int, dict[str, int]]
    held_s: float = inf


class HoldLevel(msgspec.Struct):
    """A hold level is what writers of one kind keep from use: `arrivals` that were given up, with
    `blocks` and `points` (boundaries), the oldest for `oldest_s` seconds."""

    arrivals: int = 0
    blocks: int = 0
    points: int = 0
    oldest_s: float = 0.0


class Ingest:
    """Ingest is the verified insert. Several producers may feed one prefix; the first to commit
    wins."""

    def __init__(self, tree: PrefixTree, pools: SlotPools, counters: Counters) -> None:
        self.ended = 0
        """How many arrivals are over: what was reserved for them is in the tree, or free."""
        self._tree = tree
        self._pools = pools
        self._counters = counters
        self._block = pools.layout.block_tokens
        self._pending: dict[int, Pending] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Return how many arrivals have slots that are not the cache's yet, or not again."""
        return len(self._pending)

    def reserve(self, arrival: Arrival, now: float) -> SlotsReserved | NoRoom | CacheRefused:
        """Take slots for what is not resident of the arrival, and lock the part that is."""
        size = self._tree.block_bytes
        total, rest = divmod(len(arrival.tokens), size)
        if rest or not total:
            raise InvalidInput(
                "tokens", f"{len(arrival.tokens)} bytes", f"send whole blocks of {size} bytes"
            )
        for position in arrival.points:
            if position % self._block or not 0 < position <= total * self._block:
                raise InvalidInput(
                    "points", f"{position} is no boundary", f"use multiples of {self._block}"
                )
        if self._digest(arrival) != arrival.prefix_hash:
            return CacheRefused(CacheRefusal.PREFIX_MISMATCH)
        node, depth = self._tree.walk(arrival.tokens, total)
        lock = self._tree.lock(node, depth)
        blocks = self._pools.take_blocks(total - depth)
        if isinstance(blocks, NoRoom):
            self._tree.unlock(lock)
            return blocks
        points: dict[int, dict[str, int]] = {}
        for position in arrival.points:
            taken = self._pools.take_point()
            if isinstance(taken, NoRoom):
                self._give(Pending(arrival, None, blocks, points))
                self._tree.unlock(lock)
                return taken
            points[position] = taken
        self._tickets += 1
        self._pending[self._tickets] = Pending(arrival, lock, blocks, points)
        return SlotsReserved(self._tickets, depth * self._block, tuple(blocks), points)

    def _digest(self, arrival: Arrival) -> PrefixHash:
        """Return the digest of the arrival's tokens as this side computed it, before or now."""
        known = arrival.hashed.digest_of(arrival.tokens) if arrival.hashed is not None else None
        return known or hash_prefix(arrival.tokens, self._block)[-1]

    def commit(self, ticket: int, parts: Sequence[Verified], now: float) -> Inserted | CacheRefused:
        """Put the arrival in the tree: `parts` are what lies in its slots, each as its producer
        stated it and as it was found here.

        Refused where one part is not as stated, or where a range block is in none. Point state of
        which a component is in none lacks it.
        """
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is None:
            raise InvalidInput("ticket", f"{ticket} is not reserved", "reserve it first")
        del self._pending[ticket]
        self.ended += 1
        tree, lock, arrival = self._tree, pending.lock, pending.arrival
        if not self._is_verified(parts, lock.depth, lock.depth + len(pending.blocks)):
            self._counters.quarantined += 1
            self._give(pending)
            tree.unlock(lock)
            return CacheRefused(CacheRefusal.DIGEST_MISMATCH)
        keys = arrival.tokens[lock.depth * tree.block_bytes :]
        node, depth, spares = tree.extend(lock.node, lock.depth, keys, pending.blocks)
        self._pools.blocks.give(spares)
        self._counters.duplicate_blocks += len(spares)
        tree.stop_at(node, depth, now)
        points = {(part.component, part.end) for part in parts if part.first == part.end}
        for position, taken in pending.points.items():
            at = position // self._block
            written = {name: slot for name, slot in taken.items() if (name, at) in points}
            self._pools.give_point({n: slot for n, slot in taken.items() if n not in written})
            if written:
                self._pools.hang_point(self._stop(node, at, now), written)
        tree.unlock(lock)
        tree.expose(node)
        return Inserted(depth * self._block, len(spares))

    def _is_verified(self, parts: Sequence[Verified], start: int, end: int) -> bool:
        """Tell whether all parts are as stated, and cover blocks [start, end) of every range
        component."""
        if not all(part.is_as_stated for part in parts):
            return False
        reach = dict.fromkeys(self._pools.layout.range_names, start)
        for part in sorted(parts, key=lambda part: part.first):
            at = reach.get(part.component, -1)
            if part.first <= at < part.end:
                reach[part.component] = part.end
        return all(at >= end for at in reach.values())

    def _stop(self, node: Node, depth: int, now: float) -> ResumeDepth:
        return self._tree.stop_at(prefix_tree.locate(node, depth), depth, now)

    def abort(self, ticket: int, now: float) -> None:
        """Give the arrival up. Its slots stay on hold until `quiet`."""
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is None:
            raise InvalidInput("ticket", f"{ticket} is not reserved", "reserve it first")
        self._tree.unlock(pending.lock)
        pending.lock, pending.held_s = None, now

    def quiet(self, ticket: int) -> None:
        """Free an aborted arrival's slots: its writer has said that it is done, is fenced, or was
        never given them."""
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is not None:
            raise InvalidInput("ticket", f"{ticket} is not on hold", "abort it first")
        self._give(self._pending.pop(ticket))
        self.ended += 1

    def _give(self, pending: Pending) -> None:
        self._pools.blocks.give(pending.blocks)
        for taken in pending.points.values():
            self._pools.give_point(taken)

    # -- what the checks and the metrics read --------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Count the range blocks that are reserved, and those on hold."""
        every = self._pending.values()
        reserved = sum(len(pending.blocks) for pending in every if pending.lock is not None)
        return reserved, len(self.block_slots()) - reserved

    def point_counts(self) -> tuple[int, int]:
        """Count the slots of each point pool that are reserved, and those on hold."""
        every = self._pending.values()
        reserved = sum(len(pending.points) for pending in every if pending.lock is not None)
        return reserved, sum(len(pending.points) for pending in every) - reserved

    def holds(self, now: float) -> dict[WriterKind, HoldLevel]:
        """Count what is on hold, by the kind of its writer."""
        levels = {kind: HoldLevel() for kind in WriterKind}
        for pending in self._pending.values():
            if pending.lock is None:
                level = levels[pending.arrival.writer.kind]
                level.arrivals += 1
                level.blocks += len(pending.blocks)
                level.points += len(pending.points)
                level.oldest_s = max(level.oldest_s, now - pending.held_s)
        return levels

    def on_hold(self, kind: WriterKind) -> set[int]:
        """Return the tickets of arrivals that are on hold for a writer of this kind."""
        every = self._pending.items()
        return {n for n, p in every if p.lock is None and p.arrival.writer.kind is kind}

    def block_slots(self) -> list[int]:
        """List the range blocks of all arrivals that are not in the tree."""
        return [slot for pending in self._pending.values() for slot in pending.blocks]

    def point_slots(self, index: int) -> list[int]:
        """List the slots of point component `index` of all arrivals that are not in the tree."""
        name = self._pools.points[index].name
        return [p[name] for pending in self._pending.values() for p in pending.points.values()]

    def locks(self) -> list[Receipt]:
        """List the locks on what arrivals build on."""
        return [p.lock for p in self._pending.values() if p.lock is not None]
