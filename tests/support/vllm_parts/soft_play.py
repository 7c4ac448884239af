"""Requests that come and go over a block pool, with soft references; a model pool, and vLLM's own.

Runs in the core environment (test_soft.py, by Hypothesis) and in vLLM's own, where it is a program:

    PYTHONPATH=src .venv-vllm/bin/python -m tests.support.vllm_parts.soft_play SEEDS
                                  ends with "ok", or with the failure

After every step: references conserved, no wished-for block taken that was not given up.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ownerserve.engines.vllm.scheduler_side.soft_references import (
    MOVES_PER_BLOCK,
    SoftReferences,
    free_blocks,
)
from ownerserve.engines.vllm.settings import SoftReference

TTL_S = 50.0


class ModelBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = block_id == 0
        self.block_hash: object = None
        self.next_free_block: ModelBlock | None = None


class ModelPool:
    """A pool as simple as can be: a list of the free blocks in the order they are taken."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [ModelBlock(i) for i in range(blocks)]
        self.order = self.blocks[1:]
        self.cached: dict[object, ModelBlock] = {}
        self.free_block_queue = self

    @property
    def fake_free_list_head(self) -> ModelBlock:
        """The list as vLLM's queue shows it, linked anew for whoever walks it."""
        head = ModelBlock(-1)
        for block, following in zip([head, *self.order], [*self.order, None], strict=True):
            block.next_free_block = following
        return head

    @property
    def num_free_blocks(self) -> int:
        return len(self.order)

    def get_num_free_blocks(self) -> int:
        return len(self.order)

    def touch(self, blocks: Sequence[ModelBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.order.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[ModelBlock]) -> None:
        first, last = [], []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                (last if block.block_hash is not None else first).append(block)
        self.order = [*first, *self.order, *last]

    def take(self, count: int) -> list[ModelBlock]:
        taken, self.order = self.order[:count], self.order[count:]
        assert len(taken) == count
        for block in taken:
            if self.cached.get(block.block_hash) is block:
                del self.cached[block.block_hash]
            block.block_hash = None
            block.ref_cnt = 1
        return taken

    def fill(self, block: ModelBlock, content: object) -> None:
        block.block_hash = content
        self.cached.setdefault(content, block)

    def find(self, content: object) -> ModelBlock | None:
        return self.cached.get(content)

    def reset(self) -> bool:
        if len(self.order) != len(self.blocks) - 1:
            return False
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True


def real_pool(blocks: int) -> Any:
    """vLLM's BlockPool, with the verbs of the model."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    def key(content: object) -> Any:
        return make_block_hash_with_group_id(repr(content).encode(), 0)

    class RealPool(BlockPool):
        take = BlockPool.get_new_blocks
        reset = BlockPool.reset_prefix_cache

        def fill(self, block: Any, content: object) -> None:
            self._insert_block_hash(key(content), block, num_tokens=1)

        def find(self, content: object) -> Any:
            return self.cached_block_hash_to_block.get_one_block(key(content))

    return RealPool(blocks, True, 1)


class Play:
    """One pool, one SoftReferences, requests as vLLM's scheduler treats them."""

    def __init__(self, pool: Any, *, pool_fraction: float = 0.5, softly: bool = True) -> None:
        self.pool = pool
        self.softly = softly
        self.soft = SoftReferences(
            SoftReference(ttl_s=TTL_S if softly else 0.0, pool_fraction=pool_fraction)
        )
        self.soft.bind(pool, [1])
        self.now = 0.0
        self.running: list[tuple[str, list[Any]]] = []
        self.may_be_lost = 0

    def wished(self) -> set[int]:
        """Free blocks that somebody wishes for."""
        return {block.block_id for block in self.free() if self.soft.wants(block)}

    def free(self) -> list[Any]:
        return list(free_blocks(self.pool))

    def start(self, session: str, tokens: Sequence[object]) -> int | None:
        """A request of these tokens, one to a block. How many it found; None: it has to wait."""
        self.soft.resumed(session, self.now)
        prefixes = [tuple(tokens[: n + 1]) for n in range(len(tokens))]
        hits: list[Any] = []
        for prefix in prefixes:
            block = self.pool.find(prefix)
            if block is None:
                break
            hits.append(block)
        new = len(tokens) - len(hits)
        self.make_room(new, session)
        # Blocks that it finds leave the queue first, as in vLLM; then what it takes is further in.
        wished = self.wished()
        self.may_be_lost += sum(b.ref_cnt == 0 and b.block_id not in wished for b in hits)
        self.pool.touch(hits)
        if new > self.pool.free_block_queue.num_free_blocks:
            self.pool.free_blocks(reversed(hits))
            return None
        blocks = [*hits, *self._take(new)]
        for block, prefix in zip(blocks[len(hits) :], prefixes[len(hits) :], strict=True):
            self.pool.fill(block, prefix)
        self.running.append((session, blocks))
        return len(hits)

    def make_room(self, blocks: int, asking: str) -> None:
        """`make_room`, and what it may do and may not."""
        before, counts = self.free(), [block.ref_cnt for block in self.pool.blocks]
        wished = self.wished()
        ledger_blocks = len(self.soft)
        given_up = self.soft.make_room(blocks, self.now, asking=asking)
        after, kept = self.free(), self.wished()
        assert [block.ref_cnt for block in self.pool.blocks] == counts
        assert {block.block_id for block in after} == {block.block_id for block in before}
        others = [block for block in before if block.block_id not in wished]
        assert [b for b in after if b.block_id not in wished] == others, "others keep their order"
        if blocks <= len(after) and self.softly:
            assert not kept & {block.block_id for block in after[:blocks]}
            reserve = blocks + ledger_blocks // MOVES_PER_BLOCK
            assert given_up <= max(0, reserve - len(others))

    def finish(self, at: int) -> None:
        session, blocks = self.running.pop(at)
        self.soft.finished(session, [[block.block_id for block in blocks]], self.now)
        self.pool.free_blocks(reversed(blocks))

    def abort(self, at: int) -> None:
        _, blocks = self.running.pop(at)
        self.pool.free_blocks(reversed(blocks))

    def check(self) -> None:
        """Every reference is a running request's; the ledger agrees with itself."""
        held: dict[int, int] = {}
        for _, blocks in self.running:
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == held.get(block.block_id, 0), block
        assert len(self.free()) == len(self.pool.blocks) - 1 - len(held)
        self.soft.check()
        if self.softly:
            assert self.soft.status().lost <= self.may_be_lost, "taken, and was not given up"

    def _take(self, count: int) -> list[Any]:
        return list(self.pool.take(count)) if count else []


def tokens_of(session: str, length: int) -> list[object]:
    """Sessions share a head of three blocks."""
    return [*range(3), *((session, n) for n in range(length))]


def play_at_random(pool: Any, seed: int) -> Play:
    """A few hundred steps of many sessions."""
    rng = random.Random(seed)
    play = Play(pool, pool_fraction=rng.choice([0.0, 0.3, 0.5, 1.0]))
    for _ in range(300):
        match rng.randrange(5):
            case 0 | 1:
                name = f"s{rng.randrange(6)}"
                play.start(name, tokens_of(name, rng.randrange(12)))
            case 2 if play.running:
                play.finish(rng.randrange(len(play.running)))
            case 3 if play.running:
                play.abort(rng.randrange(len(play.running)))
            case 4:
                play.now += rng.random() * 10
        play.check()
    while play.running:
        play.finish(0)
    assert play.pool.reset(), "a reset of the cache must work while sessions are kept"
    play.soft.clear()
    return play


def resume_under_noise(pool: Any, *, softly: bool) -> int:
    """Blocks that a session finds again after requests of twice the pool's blocks."""
    play = Play(pool, softly=softly)
    play.start("agent", tokens_of("agent", 20))
    play.finish(0)
    for n in range(2 * len(pool.blocks) // 10):
        play.now += 0.1
        assert play.start(f"noise {n}", [("noise", n, i) for i in range(10)]) == 0
        play.abort(0)  # requests without a session leave no wish
    found = play.start("agent", tokens_of("agent", 25))
    assert found is not None
    return found


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        play_at_random(real_pool(24), seed)
    print("with", resume_under_noise(real_pool(64), softly=True))
    print("without", resume_under_noise(real_pool(64), softly=False))
    print("ok")
