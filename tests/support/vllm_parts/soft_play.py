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

from ownerserve.engines.vllm.scheduler_side.free_order import Chain, End, Linked
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.settings import SoftReference

TTL_S = 50.0


class ModelBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = block_id == 0
        self.block_hash: object = None
        self.prev_free_block: Linked | None = None
        self.next_free_block: Linked | None = None


class ModelQueue:
    """vLLM's queue of free blocks: those that hold nothing first, then by when they were freed."""

    def __init__(self, blocks: Iterable[ModelBlock]) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = End(), End()
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0
        self.append_n(list(blocks))

    @property
    def _chain(self) -> Chain:
        return Chain(self.fake_free_list_head, self.fake_free_list_tail)

    def get_all_free_blocks(self) -> list[Any]:
        return list(self._chain)

    def popleft_n(self, n: int) -> list[Any]:
        self.num_free_blocks -= n
        return self._chain.take(n)

    def remove(self, block: Any) -> None:
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._chain.append(block)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        others = self.popleft_n(self.num_free_blocks)
        self.append_n([*blocks, *others])


class ModelPool:
    """A pool that counts references and keeps its free blocks in a queue, as vLLM's does."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [ModelBlock(i) for i in range(blocks)]
        self.cached_block_hash_to_block: dict[object, ModelBlock] = {}
        self.free_block_queue: Any = ModelQueue(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        return len(self.order)

    @property
    def order(self) -> list[Any]:
        """The free blocks in the order in which they are taken."""
        return list(self.free_block_queue.get_all_free_blocks())

    def touch(self, blocks: Sequence[ModelBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[ModelBlock]) -> None:
        first, last = [], []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                (last if block.block_hash is not None else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def take(self, count: int) -> list[ModelBlock]:
        taken: list[ModelBlock] = self.free_block_queue.popleft_n(count)
        assert len(taken) == count
        for block in taken:
            if self.cached_block_hash_to_block.get(block.block_hash) is block:
                del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None
            block.ref_cnt = 1
        return taken

    def fill(self, block: ModelBlock, content: object) -> None:
        block.block_hash = content
        self.cached_block_hash_to_block.setdefault(content, block)

    def find(self, content: object) -> ModelBlock | None:
        return self.cached_block_hash_to_block.get(content)

    def reset(self) -> bool:
        if self.free_block_queue.num_free_blocks != len(self.blocks) - 1:
            return False
        self.cached_block_hash_to_block = {}
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

    def __init__(
        self, pool: Any, *, pool_fraction: float = 0.5, softly: bool = True, groups: int = 1
    ) -> None:
        self.pool = pool
        self.softly = softly
        self._is_endless = pool_fraction == 1.0
        self.soft = SoftReferences(
            SoftReference(ttl_s=TTL_S if softly else 0.0, pool_fraction=pool_fraction)
        )
        self.soft.bind(pool, [1] * groups)
        self.now = 0.0
        self.running: list[tuple[str, list[Any]]] = []

    def wished(self) -> set[int]:
        """Free blocks that somebody wishes for."""
        return {block.block_id for block in self.free() if self.soft.wants(block)}

    def free(self) -> list[Any]:
        """The free blocks in the order in which they are taken."""
        return list(self.pool.free_block_queue.get_all_free_blocks())

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
        self.pool.touch(hits)
        if new > self.pool.free_block_queue.num_free_blocks:
            self.pool.free_blocks(reversed(hits))
            return None
        blocks = [*hits, *self.take(new)]
        for block, prefix in zip(blocks[len(hits) :], prefixes[len(hits) :], strict=True):
            self.pool.fill(block, prefix)
        self.running.append((session, blocks))
        return len(hits)

    def take(self, count: int) -> list[Any]:
        """New blocks: none that is wished for before all others."""
        if not count:
            return []
        before, wished = self.free(), self.wished()
        others = [block for block in before if block.block_id not in wished]
        given_up = self.soft.status().given_up
        taken = list(self.pool.take(count))
        assert taken[: len(others)] == others[:count], "others first, in their order"
        assert self.soft.status().given_up - given_up == max(0, count - len(others))
        assert not any(map(self.soft.wants, taken)), "nobody wishes for what a block held before"
        return taken

    def finish(self, at: int) -> None:
        session, blocks = self.running.pop(at)
        self.soft.finished(session, [[block.block_id for block in blocks]], self.now)
        if self.softly and self._is_endless:
            assert all(map(self.soft.wants, blocks)), "every block of its last turn is wished for"
        self.pool.free_blocks(reversed(blocks))

    def abort(self, at: int) -> None:
        _, blocks = self.running.pop(at)
        self.pool.free_blocks(reversed(blocks))

    def release(self, session: str) -> None:
        """The session goes elsewhere."""
        self.soft.released(session)
        self.soft.tidy(self.now)

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


def tokens_of(session: str, length: int, *, edited_at: int | None = None) -> list[object]:
    """Sessions share a head of three blocks. `edited_at`: behind so many of its own, a session goes
    on otherwise than before."""
    own: list[object] = [(session, n) for n in range(length)]
    if edited_at is not None:
        own[edited_at:] = [(session, n, "edited") for n in range(edited_at, length)]
    return [*range(3), *own]


def play_at_random(pool: Any, seed: int) -> Play:
    """A few hundred steps of many sessions."""
    rng = random.Random(seed)
    play = Play(pool, pool_fraction=rng.choice([0.0, 0.3, 0.5, 1.0]))
    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1:
                name = f"s{rng.randrange(6)}"
                edited_at = rng.choice([None, None, rng.randrange(12)])
                play.start(name, tokens_of(name, rng.randrange(12), edited_at=edited_at))
            case 2 if play.running:
                play.finish(rng.randrange(len(play.running)))
            case 3 if play.running:
                play.abort(rng.randrange(len(play.running)))
            case 4:
                play.now += rng.random() * 10
                play.soft.tidy(play.now)
            case 5:
                play.release(f"s{rng.randrange(6)}")
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
