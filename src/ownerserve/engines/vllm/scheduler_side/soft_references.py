"""Soft references change the order in which vLLM's own BlockPool evicts, and nothing else.

Owns the order of the pool's free blocks and no reference: `touch` then `free_blocks` moves a free
block to the end of the queue that vLLM evicts from the front. So a wished-for block stays a free
block. vLLM can always have it, resets its cache when it likes, and counts it as room.

    free queue   [ others ........ | wished for by idle sessions, tails first ]
                   taken first       taken when nothing else is left

Blocks that are freed later land behind; `make_room` looks at the front, just as far as blocks are
about to be taken, and moves what is wished for out of the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from ownerserve.engines.vllm.settings import SoftReference
from ownerserve.node.retention.soft_references import SoftBlock, SoftLedger, SoftLimits

MOVES_PER_BLOCK = 8
"""How much work a taken block may cost. When blocks have to be moved, so many others are brought
to the front (at worst: given up) that on average no more than this are moved for each one taken."""


class Block(Protocol):
    """A `Block` is vLLM's KVCacheBlock, as far as it is read here."""

    block_id: int
    ref_cnt: int
    is_null: bool
    next_free_block: Block | None

    @property
    def block_hash(self) -> Hashable | None: ...


class FreeQueue(Protocol):
    """A `FreeQueue` is vLLM's FreeKVCacheBlockQueue, as far as it is read here."""

    fake_free_list_head: Block
    num_free_blocks: int


class BlockPool(Protocol):
    """A `BlockPool` is vLLM's BlockPool, as far as it is used here."""

    blocks: Sequence[Block]
    free_block_queue: FreeQueue

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class SoftStatus(msgspec.Struct, frozen=True):
    """A `SoftStatus` counts what idle sessions keep now. `lost` were taken by vLLM, `given_up` were
    needed."""

    sessions: int
    blocks: int
    moved: int
    given_up: int
    expired: int
    over_limit: int
    lost: int


class SoftReferences:
    """`SoftReferences` keeps the blocks that idle sessions wish for at the far end of the pool's
    free queue (see the module). Called on the scheduler's thread only."""

    def __init__(self, settings: SoftReference) -> None:
        self._settings = settings
        self._pool: BlockPool | None = None
        self._group_block_tokens: Sequence[int] = ()
        self._ledger: SoftLedger | None = None

    @property
    def counts(self) -> Counter[str]:
        """`counts` are blocks so far: `moved`, `given_up`, `expired`, `over_limit`, `lost`."""
        return self._ledger.counts if self._ledger is not None else Counter()

    def __len__(self) -> int:
        """Return how many blocks idle sessions wish for."""
        return 0 if self._ledger is None else len(self._ledger)

    def bind(self, pool: BlockPool, group_block_tokens: Sequence[int] = ()) -> None:
        """Use this pool. `group_block_tokens` are the tokens that a block of each KV cache group
        spans."""
        self._pool = pool
        self._group_block_tokens = group_block_tokens
        if self._settings.ttl_s > 0:
            usable = len(pool.blocks) - 1  # without the null block
            max_blocks = int(usable * self._settings.pool_fraction)
            self._ledger = SoftLedger(SoftLimits(ttl_s=self._settings.ttl_s, max_blocks=max_blocks))

    def finished(
        self, session_id: str | None, blocks_by_group: Sequence[Sequence[int]], now: float
    ) -> None:
        """Refer to the blocks of a session's turn that ended well, with these block tables; 0 is
        the null block."""
        ledger, pool = self._ledger, self._pool
        if ledger is None or pool is None or session_id is None:
            return
        blocks = list(self._by_position(pool, blocks_by_group))
        if len(ledger) + len(blocks) > ledger.limits.max_blocks:
            ledger.forget_lost(self._holds)
        ledger.ended(session_id, blocks, now)

    def resumed(self, session_id: str | None, now: float) -> None:
        """Begin the session's time anew, since a turn of it is here; it may have to wait."""
        if self._ledger is not None and session_id is not None:
            self._ledger.is_back(session_id, now)

    def released(self, session_id: str) -> None:
        """Forget the session, which has gone elsewhere or is over."""
        if self._ledger is not None:
            self._ledger.drop(session_id)

    def make_room(self, blocks: int, now: float, *, asking: str | None = None) -> int:
        """Move wished-for blocks out of the way, since `blocks` are about to be taken. Called
        before each step, also one that only decodes: here references end.

        Where there are too few of those, idle sessions give up theirs, tails first, the session
        `asking` last. Returns how many were given up. Never fails: what can't be spared is taken.
        """
        ledger, pool = self._ledger, self._pool
        if ledger is None or pool is None:
            return 0
        ledger.expire(now)
        if blocks <= 0 or not len(ledger):
            return 0
        if not self._front(pool, blocks)[0]:
            return 0
        reserve = blocks + len(ledger) // MOVES_PER_BLOCK
        in_the_way, others = self._front(pool, reserve)
        given_up = 0
        fits = blocks <= pool.free_block_queue.num_free_blocks
        if others < reserve and fits:  # what does not fit waits: nothing is given up for it
            given_up = self._give_up(min(reserve - others, len(in_the_way)), asking)
            in_the_way, _ = self._front(pool, reserve)
        pool.touch(in_the_way)
        pool.free_blocks(in_the_way)
        ledger.counts["moved"] += len(in_the_way)
        return given_up

    def _give_up(self, missing: int, asking: str | None) -> int:
        """Give wishes up until `missing` free blocks are nobody's, or all are."""
        ledger, pool = self._ledger, self._pool
        assert ledger is not None and pool is not None
        given_up = 0
        for wished in ledger.give_up(asking):
            given_up += self._holds(wished) and not pool.blocks[wished.block_id].ref_cnt
            if given_up >= missing:
                break
        ledger.counts["given_up"] += given_up
        return given_up

    def clear(self) -> None:
        """Forget every wish: the cache was reset."""
        if self._ledger is not None:
            self._ledger.clear()

    def wants(self, block: Block) -> bool:
        """Return whether an idle session wishes for what the block holds now."""
        ledger = self._ledger
        return ledger is not None and ledger.wants(SoftBlock(block.block_id, block.block_hash))

    def check(self) -> None:
        """Raise InvariantViolated unless the wishes agree with themselves."""
        if self._ledger is not None:
            self._ledger.check()

    def status(self) -> SoftStatus:
        """Return what idle sessions keep now; blocks that vLLM has taken are forgotten first."""
        if self._ledger is None:
            return SoftStatus(0, 0, 0, 0, 0, 0, 0)
        self._ledger.forget_lost(self._holds)
        counts = self.counts
        names = ("moved", "given_up", "expired", "over_limit", "lost")
        return SoftStatus(
            self._ledger.sessions, len(self._ledger), *(counts[name] for name in names)
        )

    def _front(self, pool: BlockPool, blocks: int) -> tuple[list[Block], int]:
        """Return the wished-for blocks before the last of the first `blocks` others, and how many
        others there are."""
        assert self._ledger is not None
        in_the_way: list[Block] = []
        others = 0
        for block in free_blocks(pool):
            if others == blocks:
                break
            if self._ledger.wants(SoftBlock(block.block_id, block.block_hash)):
                in_the_way.append(block)
            else:
                others += 1
        return in_the_way, others

    def _by_position(
        self, pool: BlockPool, blocks_by_group: Sequence[Sequence[int]]
    ) -> Iterator[SoftBlock]:
        """Yield the cached blocks of all groups in the order of the tokens they end with."""
        lengths = self._group_block_tokens or [1] * len(blocks_by_group)
        placed = [
            ((index + 1) * tokens, group, block_id)
            for group, (ids, tokens) in enumerate(zip(blocks_by_group, lengths, strict=True))
            for index, block_id in enumerate(ids)
        ]
        for _, _, block_id in sorted(placed):
            block = pool.blocks[block_id]
            if not block.is_null and block.block_hash is not None:
                yield SoftBlock(block_id, block.block_hash)

    def _holds(self, wished: SoftBlock) -> bool:
        assert self._pool is not None
        return self._pool.blocks[wished.block_id].block_hash == wished.content


def free_blocks(pool: BlockPool) -> Iterator[Block]:
    """Yield the pool's free blocks in the order in which it takes them."""
    block = pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not None and block.block_id >= 0:  # the fake tail is -1
        yield block
        block = block.next_free_block
