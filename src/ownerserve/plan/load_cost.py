"""This module tells what must be loaded, and how long that takes on one engine at one moment's
prices.

`LoadPricer` turns bytes by tier into ms. `RangeLoadCosts` answers for [0, position) of one query.

      spans   │ device │  host  │ host │   disk    │
      books     {}       {h}      {h}    {h, d}       what [0, position) needs, by tier
                                            ^ inside a span only its own tier's bytes change
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.prices import LoadTable, Prices
from ownerserve.plan.inputs import Abilities, Piece, RangeSpan, RestoreQuery

Book = dict[Tier, int]
"""Bytes to bring, by tier."""

_Part = tuple[float, LoadTable | None, int, int | None, int, int]
"""ms of all tiers but the span's own, that one's table and bytes before the span, the span's bytes
(None: they lie in more than one tier), its start and length."""


class LoadBytes:
    """LoadBytes counts the bytes to bring, those already on their way apart."""

    __slots__ = ("late", "now", "ready_ms")

    def __init__(self) -> None:
        self.now: Book = {}
        self.late: Book = {}
        self.ready_ms = 0.0

    def add(self, piece: Piece, count: int) -> None:
        """Count `count` bytes of `piece`."""
        book = self.now
        if piece.ready_ms > 0.0:
            book = self.late
            self.ready_ms = max(self.ready_ms, piece.ready_ms)
        book[piece.tier] = book.get(piece.tier, 0) + count

    @property
    def moved_bytes(self) -> int:
        """Count the bytes that are not on the device and have no place reserved there yet."""
        moved = sum(self.now.values()) + sum(self.late.values())
        return moved - self.now.get(Tier.DEVICE, 0) - self.late.get(Tier.DEVICE, 0)


def share(piece: Piece, used: int, of: int) -> int:
    """Return the bytes of `used` tokens of a piece that spans `of`, rounded up."""
    return -(-piece.bytes * used // of)


def load_bytes_until(spans: tuple[RangeSpan, ...], position: int) -> LoadBytes:
    """Count what of `spans` must be brought for [0, position)."""
    loads = LoadBytes()
    for span in spans:
        start, end = span.start, span.end
        if start >= position:
            break
        for piece in span.pieces:
            whole = end <= position
            count = piece.bytes if whole else share(piece, position - start, end - start)
            loads.add(piece, count)
    return loads


class LoadPricer:
    """The pricer turns bytes by tier into ms, for one engine, one moment and one backlog."""

    __slots__ = ("_backlog", "tables", "via_host")

    def __init__(self, prices: Prices, abilities: Abilities, query: RestoreQuery) -> None:
        self.tables = prices.tiers
        self.via_host = abilities.landing_tier is Tier.HOST
        self._backlog = query.backlog.tier_bytes

    def has_price(self, pieces: tuple[Piece, ...]) -> bool:
        """Tell whether every tier of `pieces` can be priced."""
        return all(piece.tier is Tier.DEVICE or piece.tier in self.tables for piece in pieces)

    def ms(self, loads: LoadBytes) -> float:
        """Return the ms until all of it is in place, from when loading may begin.

        Tiers load one after another (they share the way into the device). What is still on its way
        comes last: end = max(everything else, ready) + its own load.
        """
        now_ms = self.book_ms(loads.now)
        if loads.ready_ms <= 0.0:
            return now_ms
        return max(now_ms, loads.ready_ms) + self.book_ms(loads.late)

    def book_ms(self, book: Book) -> float:
        """Return the ms that a book's bytes take to load; with a host landing all of them cross to
        the device too."""
        total_ms, landed = 0.0, 0
        for tier, count in book.items():
            if tier is Tier.DEVICE:
                continue
            landed += count
            if tier is not Tier.HOST or not self.via_host:
                total_ms += self.tables[tier].ms(count) + self.wait_ms(tier)
        if self.via_host and landed:
            total_ms += self.tables[Tier.HOST].ms(landed) + self.wait_ms(Tier.HOST)
        return total_ms

    def wait_ms(self, tier: Tier) -> float:
        """Return the ms that what was asked of `tier` before takes: part of this load's time, not
        of the engine's queue.
        """
        ahead = self._backlog.get(tier, 0)
        return self.tables[tier].ms(ahead) if ahead else 0.0

    def point_ms(self, pieces: tuple[Piece, ...]) -> float:
        """Return the ms that one boundary's point state takes; it is read apart from range
        state."""
        if not pieces:
            return 0.0
        if len(pieces) == 1 and not self.via_host:
            piece = pieces[0]
            table = self.tables.get(piece.tier)
            if table is not None and piece.ready_ms <= 0.0:
                return table.ms(piece.bytes) + (self.wait_ms(piece.tier) if self._backlog else 0.0)
        if not self.has_price(pieces):
            return inf
        loads = LoadBytes()
        for piece in pieces:
            loads.add(piece, piece.bytes)
        return self.ms(loads)


class RangeLoadCosts:
    """RangeLoadCosts tells how long the range state of [0, position) of one query takes to load."""

    __slots__ = ("_before", "_ends", "_load_pricer", "_parts", "_spans", "covered")

    def __init__(self, spans: tuple[RangeSpan, ...], load_pricer: LoadPricer) -> None:
        self._load_pricer = load_pricer
        self._spans = spans
        self.covered = 0
        """How far range state can be had, from 0."""
        total = LoadBytes()
        self._ends: list[int] = []
        # Bytes before each span, by tier. None where only a full sum will do: loads under way, a
        # second hop.
        self._before: list[Book] | None = []
        for span in spans:
            if not load_pricer.has_price(span.pieces):
                break
            self._before.append(total.now.copy())
            for piece in span.pieces:
                total.add(piece, piece.bytes)
            self.covered = span.end
            self._ends.append(span.end)
        if total.late or load_pricer.via_host or Tier.DEVICE in total.now:
            self._before = None
        self._parts: dict[int, _Part] = {}

    def ms_until(self, position: int) -> float:
        """Return the ms that loading [0, position) takes; `position` must not exceed `covered`."""
        if position <= 0:
            return 0.0
        if self._before is None:
            return self._load_pricer.ms(load_bytes_until(self._spans, position))
        at = bisect_left(self._ends, position)
        part = self._parts.get(at)
        if part is None:
            part = self._parts[at] = self._part(at, self._before[at])
        base_ms, table, own_bytes, piece_bytes, start, length = part
        if table is None:
            return base_ms
        if piece_bytes is None:
            return self._load_pricer.ms(load_bytes_until(self._spans, position))
        return base_ms + table.ms(own_bytes - (-piece_bytes * (position - start) // length))

    def moved_until(self, position: int) -> int:
        """Count the bytes of [0, position) that newly come to the device."""
        return load_bytes_until(self._spans, position).moved_bytes

    def _part(self, at: int, before: Book) -> _Part:
        """Return what is the same for all positions inside span `at`."""
        load_pricer, span = self._load_pricer, self._spans[at]
        own_tier, table, own_bytes, base_ms = None, None, 0, 0.0
        piece_bytes: int | None = 0
        if span.pieces:
            own_tier = span.pieces[0].tier
            piece_bytes = span.pieces[0].bytes if len(span.pieces) == 1 else None
            table, base_ms = load_pricer.tables[own_tier], load_pricer.wait_ms(own_tier)
        for tier, count in before.items():
            if tier is own_tier:
                own_bytes = count
            elif count:
                base_ms += load_pricer.tables[tier].ms(count) + load_pricer.wait_ms(tier)
        return base_ms, table, own_bytes, piece_bytes, span.start, span.end - span.start
