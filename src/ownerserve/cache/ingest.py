"""Ingest takes in state from outside: a transfer, a store, another worker. It is the one door, and
it verifies.

Owns the slots of arrivals that are not in the tree yet. Nothing becomes matchable before its
prefix hash and its digest are right (invariant 4).

    reserve -> RESERVED -- commit(digest) --> in the tree
                   |  `--- commit(wrong) ---> slots free, counted as quarantined
                   `------ abort -----------> HELD -- quiet --> slots free

An aborted arrival's slots stay on hold until its writer is proven quiet: a timeout is no proof
that a remote write has stopped.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.counters import Counters
from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefusal,
    CacheRefused,
    Inserted,
    NoRoom,
    SlotsReserved,
)
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, Receipt, ResumeDepth
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import hash_prefix


class Pending(msgspec.Struct, eq=False):
    """A pending arrival is one between reserve and commit, or on hold (`lock` is None then)."""

    arrival: Arrival
    lock: Receipt | None
    blocks: list[int]
    points: dict[int, dict[str, int]]


class Ingest:
    """Ingest is the verified insert. Several producers may feed one prefix; the first to commit
    wins."""

    def __init__(self, tree: PrefixTree, pools: SlotPools, counters: Counters) -> None:
        self._tree = tree
        self._pools = pools
        self._counters = counters
        self._block = pools.layout.block_tokens
        self._pending: dict[int, Pending] = {}
        self._tickets = 0

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

    def commit(self, ticket: int, digest: bytes, now: float) -> Inserted | CacheRefused:
        """Put the arrival in the tree: its bytes are written, and `digest` was computed here over
        them."""
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is None:
            raise InvalidInput("ticket", f"{ticket} is not reserved", "reserve it first")
        del self._pending[ticket]
        tree, lock, arrival = self._tree, pending.lock, pending.arrival
        if digest != arrival.digest:
            self._counters.quarantined += 1
            self._give(pending)
            tree.unlock(lock)
            return CacheRefused(CacheRefusal.DIGEST_MISMATCH)
        keys = arrival.tokens[lock.depth * tree.block_bytes :]
        node, depth, spares = tree.extend(lock.node, lock.depth, keys, pending.blocks)
        self._pools.blocks.give(spares)
        self._counters.duplicate_blocks += len(spares)
        tree.stop_at(node, depth, now)
        for position, taken in pending.points.items():
            self._pools.hang_point(self._stop(node, position // self._block, now), taken)
        tree.unlock(lock)
        tree.expose(node)
        return Inserted(depth * self._block, len(spares))

    def _stop(self, node: Node, depth: int, now: float) -> ResumeDepth:
        return self._tree.stop_at(prefix_tree.locate(node, depth), depth, now)

    def abort(self, ticket: int) -> None:
        """Give the arrival up. Its slots stay on hold until `quiet`."""
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is None:
            raise InvalidInput("ticket", f"{ticket} is not reserved", "reserve it first")
        self._tree.unlock(pending.lock)
        pending.lock = None

    def quiet(self, ticket: int) -> None:
        """Free an aborted arrival's slots: its writer has acknowledged, or is fenced."""
        pending = self._pending.get(ticket)
        if pending is None or pending.lock is not None:
            raise InvalidInput("ticket", f"{ticket} is not on hold", "abort it first")
        self._give(self._pending.pop(ticket))

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
