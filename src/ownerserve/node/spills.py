"""Spills: sessions that went idle, and what of theirs is copied to the store. Pure.

    turn ends ── spill_after_s ── Find what is missing ── Copy, some bytes a tick ── Kept

Range state goes as the grid cuts it; point state at the boundaries that the checkpoint policy
names, as far as the device still has it. A copy is asked for only while the blocks stand in the
tree, and is made at once: no lock outlives the tick, and nothing waits for a medium. A turn that
arrives meanwhile wins: what was not begun is left for its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec

from ownerserve.cache import paths
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.node import Node
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import Packed
from ownerserve.node.chains import Chains
from ownerserve.node.events import Copy, Effect, Ended, Errand, Find, Found
from ownerserve.node.records import Cell, Digests, RecordNames
from ownerserve.node.settings import NodeSettings
from ownerserve.plan.gaps import GapStats
from ownerserve.plan.swa.base import CheckpointPolicy, Produced, TurnSpan

FIND_DEADLINE_S = 5.0
SESSIONS_KEPT = 4096
"""Idle sessions that are remembered, with their gaps; the longest idle are forgotten first."""


class Idle(msgspec.Struct, eq=False):
    """A session between two turns; `points` are the depths whose state is wanted in the store."""

    since_s: float
    points: set[int]


class Batch(msgspec.Struct, eq=False):
    """One session's copies. `missing` None: the store has not been heard yet.

    `pieces` are cells of range state, and empty ones that stand for the point at their end.
    """

    session_id: SessionId
    tokens: Packed
    digests: Digests
    pieces: deque[Cell]
    missing: dict[bytes, None] | None = None


class Spills:
    """Who is idle, what is being copied, and what was kept."""

    def __init__(
        self,
        cache: HeteroCache,
        names: RecordNames,
        chains: Chains,
        *,
        policy: CheckpointPolicy,
        settings: NodeSettings,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.gaps: dict[SessionId, GapStats] = {}
        self._cache = cache
        self._names = names
        self._chains = chains
        self._policy = policy
        self._settings = settings
        self._block = cache.layout.block_tokens
        self._idle: OrderedDict[SessionId, Idle] = OrderedDict()
        # All wait equally long, so the first is due first.
        self._due: dict[SessionId, float] = {}
        self._looking: dict[Errand, Batch] = {}
        self._copying: deque[Batch] = deque()
        self._in_flight: set[Errand] = set()

    # -- events --------------------------------------------------------------------------------

    def ended(self, session_id: SessionId, event: Ended, now: float) -> None:
        """A turn of the session is over: it is idle until it comes back."""
        span = TurnSpan(event.restored, event.prompt, event.tokens, self._block)
        self._policy.observe(Produced(span))
        points = {at // self._block for at in self._policy.checkpoints(span)}
        before = self._idle.pop(session_id, None)
        if before is not None:
            points |= before.points
        self._idle[session_id] = Idle(now, points)
        self._due.pop(session_id, None)
        self._due[session_id] = now + self._settings.spill_after_s
        if len(self._idle) > SESSIONS_KEPT:
            forgotten, _ = self._idle.popitem(last=False)
            self._due.pop(forgotten, None)
            self.gaps.pop(forgotten, None)

    def resumed(self, session_id: SessionId, now: float) -> None:
        """The session is back. Its gap is learnt; what is not copied waits for the turn's end."""
        idle = self._idle.get(session_id)
        if idle is None:
            return
        self.gaps.setdefault(session_id, GapStats()).observe(max(0.0, now - idle.since_s))
        self._due.pop(session_id, None)
        self._looking = {e: b for e, b in self._looking.items() if b.session_id != session_id}
        self._copying = deque(b for b in self._copying if b.session_id != session_id)

    def stayed(self, session_id: SessionId, now: float) -> None:
        """The session's turn came to nothing: it is as idle as before."""
        if session_id in self._idle:
            self._due.pop(session_id, None)
            self._due[session_id] = now + self._settings.spill_after_s

    def hurry(self) -> None:
        """Everything idle is due now: the worker is about to stop."""
        self._due = dict.fromkeys(self._due, 0.0)

    def found(self, event: Found) -> bool:
        """The store has said what it has of a batch; whether the errand was one of ours."""
        batch = self._looking.pop(event.errand, None)
        if batch is None:
            return False
        missing = batch.missing
        assert missing is not None
        for id_ in event.held:
            missing.pop(id_, None)
        self._copying.append(batch)
        return True

    def landed(self, errand: Errand, outcome: str) -> None:
        """A copy was kept, or was not. One that nobody knows is an echo."""
        if errand in self._in_flight:
            self._in_flight.remove(errand)
            self.counts[outcome] += 1

    def tick(self, now: float, next_errand: Callable[[], Errand]) -> list[Effect]:
        """Open batches for who is due, and copy some bytes."""
        effects: list[Effect] = []
        for session_id in [s for s, due_s in self._due.items() if due_s <= now]:
            del self._due[session_id]
            batch = self._batch(session_id, self._idle[session_id])
            if batch is not None:
                errand = next_errand()
                self._looking[errand] = batch
                ids = tuple(batch.missing or ())
                effects.append(Find(errand, ids, now + FIND_DEADLINE_S))
        left = self._settings.copy_bytes_a_tick
        while self._copying and left > 0 and len(self._in_flight) < self._settings.copies_in_flight:
            batch = self._copying[0]
            if not batch.pieces:
                self._copying.popleft()
                self._done(batch.session_id)
                continue
            for copy in self._copies(batch, batch.pieces.popleft(), next_errand):
                left -= len(copy.slots) * self._names.slot_bytes(copy.component)
                self._in_flight.add(copy.errand)
                effects.append(copy)
        return effects

    def next_due(self) -> float | None:
        """When `tick` has something to do; 0: now."""
        if self._copying and len(self._in_flight) < self._settings.copies_in_flight:
            return 0.0
        return next(iter(self._due.values()), None)

    @property
    def is_busy(self) -> bool:
        """Whether copies are being made or waited for."""
        return bool(self._looking or self._copying or self._in_flight)

    # -- parts ---------------------------------------------------------------------------------

    def _done(self, session_id: SessionId) -> None:
        self.counts["sessions"] += 1
        idle = self._idle.get(session_id)
        if idle is not None:
            idle.points.clear()

    def _batch(self, session_id: SessionId, idle: Idle) -> Batch | None:
        """What of the session stands on the device, cut into records."""
        session = self._cache.sessions.get(session_id)
        if session is None or session.node is None or not session.depth or session.running:
            return None
        tree = self._cache.tree
        tokens = paths.tokens(session.node, 0, session.depth, block_bytes=tree.block_bytes)
        digests = self._chains.digests(tokens, session_id)
        layout, missing = self._names.layout, dict[bytes, None]()
        pieces = deque(self._names.cells(session.depth))
        for cell in pieces:
            for name in layout.range_names:
                missing[self._names.range_id(name, cell, digests)] = None
        # The newest first: it is what the next turn most likely goes on from.
        for depth in sorted(idle.points, reverse=True):
            if layout.point_names and depth <= session.depth:
                pieces.append(Cell(depth, depth))
                for name in layout.point_names:
                    missing[self._names.point_id(name, depth, digests)] = None
        return Batch(session_id, tokens, digests, pieces, missing)

    def _copies(
        self, batch: Batch, piece: Cell, next_errand: Callable[[], Errand]
    ) -> Iterable[Copy]:
        """The copies of one piece: all of its components that are missing, or none if it went."""
        node, depth = self._cache.tree.walk(batch.tokens, piece.end)
        if depth < piece.end:
            self.counts["evicted_first"] += 1
            return
        missing = batch.missing
        assert missing is not None
        names = self._names
        if piece.first == piece.end:
            for name, slot in self._point_slots(node, piece.end).items():
                if names.point_id(name, piece.end, batch.digests) in missing:
                    meta = names.point_meta(name, piece.end, batch.digests)
                    yield Copy(next_errand(), meta, name, (slot,))
            return
        slots: tuple[int, ...] | None = None
        for name in names.layout.range_names:
            if names.range_id(name, piece, batch.digests) in missing:
                if slots is None:  # all range components fill in lock-step: one row for all
                    slots = tuple(paths.row(node, piece.end)[piece.first :])
                meta = names.range_meta(name, piece, batch.digests)
                yield Copy(next_errand(), meta, name, slots)

    def _point_slots(self, node: Node, depth: int) -> dict[str, int]:
        """Slots of the complete point state at `depth`; none when something of it is gone."""
        names = self._names.layout.point_names
        stop = paths.complete_stop(node, depth)
        if stop is None or stop.depth != depth or stop.slots is None:
            self.counts["point_gone"] += 1
            return {}
        return dict(zip(names, stop.slots, strict=True))
