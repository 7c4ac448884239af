"""vLLM's KV cache manager over a model pool: block tables, hits, what a window leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.vllm_parts.fake_vllm.request import BLOCK, FakeRequest
from tests.support.vllm_parts.soft_play import ModelBlock, ModelPool

Blocks = list[list[ModelBlock]]
"""By KV cache group."""


class FakePool(ModelPool):
    """vLLM's block pool, whose cached blocks are found by hash and group."""

    hash_block_size = BLOCK
    enable_caching = True

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.num_gpu_blocks = blocks

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> list[ModelBlock] | None:
        found = [self.find((block_hash, group)) for group in groups]
        return None if None in found else [block for block in found if block is not None]

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        for block in (self.blocks[block_id] for block_id in block_ids):
            if self.cached_block_hash_to_block.get(block.block_hash) is block:
                del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None


class FakeCacheManager:
    """vLLM's `KVCacheManager`. `windows` are the KV cache groups: tokens that each looks back; 0:
    at all of them."""

    def __init__(self, pool: FakePool, windows: Sequence[int]) -> None:
        self.block_pool = pool
        self.windows = windows
        self._null = pool.blocks[0]
        self._tables: dict[str, Blocks] = {}

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        tables = self._tables.get(request_id) or [[] for _ in self.windows]
        return tuple([block.block_id for block in table] for table in tables)

    def get_computed_blocks(self, request: FakeRequest) -> tuple[Blocks, int]:
        """The longest prefix that every group has what it takes of; the last token is computed."""
        most = (request.num_tokens - 1) // BLOCK
        for depth in range(most, 0, -1):
            found = [self._found(request, group, depth) for group in range(len(self.windows))]
            if all(blocks is not None for blocks in found):
                return [blocks for blocks in found if blocks is not None], depth * BLOCK
        return [[] for _ in self.windows], 0

    def _found(self, request: FakeRequest, group: int, depth: int) -> list[ModelBlock] | None:
        first = self._skipped(group, depth * BLOCK)
        blocks = [self._null] * first
        for at in range(first, depth):
            block = self.block_pool.find((request.block_hashes[at], group))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _skipped(self, group: int, computed: int) -> int:
        """How many blocks the next token of a group does not look back at."""
        window = self.windows[group]
        return max(0, computed - window + 1) // BLOCK if window else 0

    def allocate_slots(
        self,
        request: FakeRequest,
        num_new_tokens: int,
        *,
        hits: Blocks | None = None,
        local: int = 0,
        external: int = 0,
    ) -> bool:
        """Give the request blocks for what it has and what it computes; False: there are none.
        Blocks into which something is brought are cached later."""
        computed = request.num_computed_tokens + local + external
        self.remove_skipped_blocks(
            request.request_id, max(0, computed - request.num_in_flight_tokens)
        )
        tables = self._tables.get(request.request_id) or [[] for _ in self.windows]
        needed = -(-(computed + num_new_tokens) // BLOCK)
        own, fresh = [], 0
        for group, table in enumerate(tables):
            skipped = min(self._skipped(group, computed), computed // BLOCK)
            kept = table
            if hits is not None and not table:
                kept = [*[self._null] * min(skipped, local // BLOCK), *hits[group][skipped:]]
                kept += [self._null] * (skipped - len(kept))
            own.append(kept)
            fresh += max(0, needed - len(kept))
        adopted = [b for table in own for b in table if not b.is_null] if hits is not None else []
        free = self.block_pool.get_num_free_blocks() - sum(b.ref_cnt == 0 for b in adopted)
        if fresh > free:
            return False
        self.block_pool.touch(adopted)
        for table in own:
            table += self._taken(needed - len(table))
        self._tables[request.request_id] = own
        if not external:
            self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return True

    def _taken(self, count: int) -> list[ModelBlock]:
        return self.block_pool.take(count) if count > 0 else []

    def cache_blocks(self, request: FakeRequest, num_computed_tokens: int) -> None:
        """Let others find the request's whole blocks of so many tokens."""
        for group, table in enumerate(self._tables.get(request.request_id, ())):
            for at in range(num_computed_tokens // BLOCK):
                if not table[at].is_null and table[at].block_hash is None:
                    self.block_pool.fill(table[at], (request.block_hashes[at], group))

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        for group, table in enumerate(self._tables.get(request_id, ())):
            end = min(self._skipped(group, processed_computed_tokens), len(table))
            gone = [at for at in reversed(range(end)) if not table[at].is_null]
            self.block_pool.free_blocks([table[at] for at in gone])
            for at in gone:
                table[at] = self._null

    def pop_blocks_for_free(self, request: FakeRequest) -> list[Any]:
        """Forget the request's tables and return its blocks, the last ones first."""
        tables = self._tables.pop(request.request_id, [])
        return [block for table in tables for block in reversed(table) if not block.is_null]
