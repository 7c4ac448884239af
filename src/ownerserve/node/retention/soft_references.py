"""Soft references: which cached blocks of an engine's own pool idle sessions would like to find.

Owns a list of blocks for each idle session; the pool owns the blocks, and takes one whenever it
must: a soft reference is a wish about the order of eviction, never a count. A block is named by
its id *and* its content (the engine's hash), since an id is used again.

    session's blocks, by position    [ head ........................ tail ]
    given up                                              <- one by one, from the session
                                                             that ended longest ago
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice

import msgspec

from ownerserve.kv.errors import InvalidInput, InvariantViolated


class SoftBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block of the pool while it holds `content`."""

    block_id: int
    content: Hashable


class SoftLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long (`ttl_s`) and how many (`max_blocks`, over all sessions)."""

    ttl_s: float
    max_blocks: int

    def __post_init__(self) -> None:
        if self.ttl_s <= 0:
            raise InvalidInput("ttl_s", f"{self.ttl_s}", "use more than 0 seconds")
        if self.max_blocks < 0:
            raise InvalidInput("max_blocks", f"{self.max_blocks}", "use 0 or more")


class _Held(msgspec.Struct):
    blocks: list[SoftBlock]
    until_s: float


class SoftLedger:
    """Who wishes for which block. Sessions stand in the order in which their last turn ended."""

    def __init__(self, limits: SoftLimits) -> None:
        self.counts: Counter[str] = Counter()
        self.limits = limits
        self._sessions: dict[str, _Held] = {}
        self._wishes: dict[SoftBlock, int] = {}

    def __len__(self) -> int:
        """Blocks that somebody wishes for."""
        return len(self._wishes)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def wants(self, block: SoftBlock) -> bool:
        """Whether somebody wishes for the block with what it holds."""
        return block in self._wishes

    def ended(self, session_id: str, blocks: Sequence[SoftBlock], now: float) -> None:
        """A turn is over: its `blocks`, by position, replace what the session wished for.

        Over the limit the sessions that ended longest ago give up theirs, at last this one.
        """
        self.drop(session_id)
        if not blocks:
            return
        self._sessions[session_id] = _Held(list(blocks), now + self.limits.ttl_s)
        for block in blocks:
            self._wishes[block] = self._wishes.get(block, 0) + 1
        excess = len(self._wishes) - self.limits.max_blocks
        self.counts["over_limit"] += sum(1 for _ in islice(self.give_up(), max(0, excess)))

    def is_back(self, session_id: str, now: float) -> None:
        """The session's next turn is here: its time begins anew while the turn waits."""
        held = self._sessions.get(session_id)
        if held is not None:
            held.until_s = now + self.limits.ttl_s

    def drop(self, session_id: str) -> None:
        """Forget the session."""
        held = self._sessions.pop(session_id, None)
        if held is not None:
            for block in held.blocks:
                self._unwish(block)

    def expire(self, now: float) -> int:
        """Forget sessions whose time is over; blocks that nobody wishes for any more."""
        before = len(self._wishes)
        for session_id in [s for s, held in self._sessions.items() if held.until_s <= now]:
            self.drop(session_id)
        expired = before - len(self._wishes)
        self.counts["expired"] += expired
        return expired

    def forget_lost(self, holds: Callable[[SoftBlock], bool]) -> int:
        """Forget blocks that no longer hold what was wished for; how many."""
        lost = {block for block in self._wishes if not holds(block)}
        for session_id, held in list(self._sessions.items()):
            held.blocks = [block for block in held.blocks if block not in lost]
            if not held.blocks:
                del self._sessions[session_id]
        for block in lost:
            del self._wishes[block]
        self.counts["lost"] += len(lost)
        return len(lost)

    def give_up(self, spare: str | None = None) -> Iterator[SoftBlock]:
        """Blocks that nobody wishes for any more, one at a time; stop when it is enough.

        The session `spare` comes last.
        """
        sessions = [s for s in self._sessions if s != spare]
        if spare is not None and spare in self._sessions:
            sessions.append(spare)
        for session_id in sessions:
            blocks = self._sessions[session_id].blocks
            while blocks:
                block = blocks.pop()
                if not blocks:
                    del self._sessions[session_id]
                if self._unwish(block):
                    yield block

    def clear(self) -> None:
        """Forget everybody."""
        self._sessions.clear()
        self._wishes.clear()

    def check(self) -> None:
        """Raise InvariantViolated unless wishes and sessions agree."""
        held = Counter(block for one in self._sessions.values() for block in one.blocks)
        if held != Counter(self._wishes):
            raise InvariantViolated(f"soft references: sessions {held}, wishes {self._wishes}")
        if len(held) > self.limits.max_blocks:
            raise InvariantViolated(f"soft references: {len(held)} blocks, {self.limits}")

    def _unwish(self, block: SoftBlock) -> bool:
        """Whether that was the last wish for it."""
        self._wishes[block] -= 1
        if self._wishes[block]:
            return False
        del self._wishes[block]
        return True
