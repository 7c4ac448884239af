"""Stored looks tell what a node could lend of its sessions from below its device.

    asked thread    behind, find    what the node knows of its sessions
    look thread     look            what of a session stands in the store now

A look is a hint, and holds nothing: what was told may go before it is lent (stored_lends.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.rpc import AskPrefix, PrefixIs
from ownerserve.node.transfers.lending import FoundRecord, SessionHint
from ownerserve.node.vocabulary.records import RecordNames, TipRecords
from ownerserve.plan.cost.prices import Prices

log = logging.getLogger("ownerserve.transfer")

LENT_TIERS = (Tier.HOST, Tier.DISK)


class StoredSessions(Protocol):
    """`StoredSessions` know what was copied below the device (node.ownership.inventory); asked
    where the node is."""

    def records(self, session_id: SessionId) -> TipRecords | None:
        """Return the records of the session as it was last copied; None: it is not known."""
        ...


class StandingRecords(Protocol):
    """`StandingRecords` are the media whose records are lent; the call waits."""

    def standing(self, ids: Sequence[bytes]) -> Mapping[Tier, Set[bytes]]:
        """Return which of `ids` stand in host memory and on disk."""
        ...


class StoredPrefix(NamedTuple):
    """A stored prefix is what may be below the device of a session's first `blocks` blocks, and
    what reading took when that was asked."""

    records: TipRecords
    blocks: int
    prices: Prices


class StoredLooks:
    """`StoredLooks` tell of what one node has in its store."""

    def __init__(
        self,
        names: RecordNames,
        sessions: StoredSessions,
        store: StandingRecords,
        *,
        prices: Callable[[], Prices],
    ) -> None:
        self._names = names
        self._sessions = sessions
        self._store = store
        self._prices = prices
        self._looking = ThreadPoolExecutor(1, "transfer-look")

    # -- where the node is ---------------------------------------------------------------------

    def behind(self, asked: AskPrefix, held: PrefixIs) -> StoredPrefix | None:
        """Return what may be below the device beyond what it holds; None: nothing more."""
        records = self._records(SessionHint(asked.session_id, asked.parent, asked.tokens))
        if records is None:
            return None
        blocks = min(records.tip.depth, asked.tokens // self._block)
        points = tuple(depth * self._block for depth in records.points if depth <= blocks)
        if self._reach(PrefixIs(blocks * self._block, points)) <= self._reach(held):
            return None
        return StoredPrefix(records, blocks, self._prices())

    def find(self, hint: SessionHint, ids: Sequence[bytes]) -> Mapping[bytes, FoundRecord]:
        """Return what those of `ids` stand for that are the session's, or its parent's."""
        records = self._records(hint)
        named = {} if records is None else dict(self._named(records))
        return {id_: named[id_] for id_ in ids if id_ in named}

    def close(self) -> None:
        """Begin to look at nothing any more."""
        self._looking.shutdown(wait=False, cancel_futures=True)

    # -- on any thread -------------------------------------------------------------------------

    def look(
        self, stored: StoredPrefix, held: PrefixIs, *, told: Callable[[PrefixIs], None]
    ) -> None:
        """Find what stands in the store now; `told` hears of it, or of what the device holds where
        that is as much. Does not wait."""

        def looked() -> None:
            found = held
            try:
                below = self._told(stored)
                found = below if self._reach(below) > self._reach(held) else held
            except Exception:  # the root of this thread: the device's word stands
                log.exception("what lies below the device is not told")
            told(found)

        try:
            self._looking.submit(looked)
        except RuntimeError:  # it is closed
            told(held)

    @property
    def _block(self) -> int:
        return self._names.layout.block_tokens

    def _records(self, hint: SessionHint) -> TipRecords | None:
        for session_id in (hint.session_id, hint.parent):
            if session_id is not None and (found := self._sessions.records(session_id)):
                return found
        return None

    def _reach(self, held: PrefixIs) -> tuple[int, int]:
        """Return up to where a turn can go on from what is held, and where range state ends."""
        points = self._names.point_names
        return (max(held.points, default=0) if points else held.tokens, held.tokens)

    def _cells(self, records: TipRecords) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Yield each cell of the tip: the depth at which it ends, and its ids by component."""
        yield from zip(self._names.ends(records.tip.depth), records.ranges, strict=True)

    def _named(self, records: TipRecords) -> Iterator[tuple[bytes, FoundRecord]]:
        for end, ids in self._cells(records):
            first = self._names.cell_ending_at(end).first
            for name, id_ in zip(self._names.range_names, ids, strict=True):
                yield id_, FoundRecord(name, first, end)
        for depth, ids in records.points.items():
            for name, id_ in zip(self._names.point_names, ids, strict=True):
                yield id_, FoundRecord(name, depth, depth)

    def _told(self, stored: StoredPrefix) -> PrefixIs:
        """Look, and return what can be had of the prefix without a gap, and how long it takes to
        read."""
        records = stored.records
        standing = self._store.standing(records.ids)
        held = frozenset[bytes]().union(*(standing.get(tier, ()) for tier in LENT_TIERS))
        depth, needed = 0, list[bytes]()
        for end, ids in self._cells(records):
            if end > stored.blocks or not held.issuperset(ids):
                break
            depth, needed = end, [*needed, *ids]
        points = sorted(at for at, ids in records.points.items() if at <= depth and held >= {*ids})
        if not depth or (tip := records.tip.ends.get(depth - 1)) is None:
            return PrefixIs(0)
        needed += records.points[points[-1]] if points else ()
        ready_ms = self._read_ms(records, needed, standing, prices=stored.prices)
        at = tuple(point * self._block for point in points)
        return PrefixIs(depth * self._block, at, tip, ready_ms)

    def _read_ms(
        self,
        records: TipRecords,
        ids: Sequence[bytes],
        standing: Mapping[Tier, Set[bytes]],
        *,
        prices: Prices,
    ) -> float:
        """Return what reading these takes, each from the fastest tier, one tier behind the
        other."""
        named, sizes = dict(self._named(records)), Counter[Tier]()
        for id_ in ids:
            tier = next(tier for tier in LENT_TIERS if id_ in standing.get(tier, ()))
            record = named[id_]
            units = max(1, record.end - record.first)
            sizes[tier] += units * self._names.slot_bytes(record.component)
        return sum(prices.tiers[tier].ms(count) for tier, count in sizes.items())
