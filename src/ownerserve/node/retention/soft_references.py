"""Soft references say which cached blocks of an engine's own pool idle sessions would like to find.

Owns a list of blocks for each idle session; the pool owns the blocks, and takes one whenever it
must: a soft reference asks for an order of eviction, and never counts. A block is named by
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
    """A `SoftBlock` is a block of the pool while it holds `content`."""

    block_id: int
    content: Hashable


class SoftLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`SoftLimits` bound soft references: `ttl_s` seconds for each, `max_blocks` blocks in all.
    Raises InvalidInput for a time of 0 or less and for fewer than 0 blocks."""

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
    """A `SoftLedger` keeps the blocks that idle sessions refer to; the session idle for longest
    stands first."""

    def __init__(self, limits: SoftLimits) -> None:
        self.counts: Counter[str] = Counter()
        self.limits = limits
        self._sessions: dict[str, _Held] = {}
        self._references: dict[SoftBlock, int] = {}

    def __len__(self) -> int:
        """Return how many blocks some session refers to."""
        return len(self._references)

    @property
    def sessions(self) -> int:
        """`sessions` counts those that have a soft reference."""
        return len(self._sessions)

    def wants(self, block: SoftBlock) -> bool:
        """Return whether a session refers to the block with what it holds."""
        return block in self._references

    def ended(self, session_id: str, blocks: Sequence[SoftBlock], now: float) -> None:
        """Let the session refer to `blocks`, by position, in place of what it referred to: a turn
        of it has ended.

        Over the limit the sessions that ended longest ago give up theirs, at last this one.
        """
        self.drop(session_id)
        if not blocks:
            return
        self._sessions[session_id] = _Held(list(blocks), now + self.limits.ttl_s)
        for block in blocks:
            self._references[block] = self._references.get(block, 0) + 1
        excess = len(self._references) - self.limits.max_blocks
        self.counts["over_limit"] += sum(1 for _ in islice(self.give_up(), max(0, excess)))

    def is_back(self, session_id: str, now: float) -> None:
        """Begin the session's time anew, since its next turn is here and may have to wait."""
        held = self._sessions.get(session_id)
        if held is not None:
            held.until_s = now + self.limits.ttl_s

    def drop(self, session_id: str) -> None:
        """Forget the session and its references; one that has none is no error."""
        held = self._sessions.pop(session_id, None)
        if held is not None:
            for block in held.blocks:
                self._unwish(block)

    def expire(self, now: float) -> int:
        """Forget the sessions whose time is over; return how many blocks nobody refers to any
        more."""
        before = len(self._references)
        for session_id in [s for s, held in self._sessions.items() if held.until_s <= now]:
            self.drop(session_id)
        expired = before - len(self._references)
        self.counts["expired"] += expired
        return expired

    def forget_lost(self, holds: Callable[[SoftBlock], bool]) -> int:
        """Forget the blocks that no longer hold what was wished for; return how many."""
        lost = {block for block in self._references if not holds(block)}
        for session_id, held in list(self._sessions.items()):
            held.blocks = [block for block in held.blocks if block not in lost]
            if not held.blocks:
                del self._sessions[session_id]
        for block in lost:
            del self._references[block]
        self.counts["lost"] += len(lost)
        return len(lost)

    def give_up(self, spare: str | None = None) -> Iterator[SoftBlock]:
        """Yield blocks that nobody refers to any more, one at a time, as references are given up;
        stop when it is enough.

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
        """Forget all sessions and references."""
        self._sessions.clear()
        self._references.clear()

    def check(self) -> None:
        """Raise InvariantViolated unless references and sessions agree."""
        held = Counter(block for one in self._sessions.values() for block in one.blocks)
        if held != Counter(self._references):
            raise InvariantViolated(
                f"soft references: sessions {held}, references {self._references}"
            )
        if len(held) > self.limits.max_blocks:
            raise InvariantViolated(f"soft references: {len(held)} blocks, {self.limits}")

    def _unwish(self, block: SoftBlock) -> bool:
        """Take one reference off the block; return whether it was the last one."""
        self._references[block] -= 1
        if self._references[block]:
            return False
        del self._references[block]
        return True
