"""SGLang's RadixCache as a process: one JSON operation a line in, one JSON answer a line out.

Runs in the optional environment .venv-sglang, with benchmarks/ on its path: started by
test_differential_sglang.py, which says what is compared.
"""

from __future__ import annotations

from array import array

from cache.serve import serve
from cache.sglang_import import Allocator, stub_torchvision

stub_torchvision()

from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402


def key_of(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


class Oracle:
    """One simulated cache and the locks that are open in it."""

    def reset(self, page: int) -> None:
        self.page = page
        self.tree = RadixCache.create_simulated(mock_allocator=Allocator(page), page_size=page)
        self.locks: dict[str, object] = {}

    def match(self, tokens: list[int]) -> int:
        if len(tokens) < self.page:  # less than a page is in nobody's tree
            return 0
        found = self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        return int(found.device_prefix_len)

    def insert(self, tokens: list[int]) -> int:
        """How much of it was there."""
        if len(tokens) < self.page:
            return 0
        return int(self.tree.insert(InsertParams(key=key_of(tokens))).prefix_len)

    def lock(self, name: str, tokens: list[int]) -> int:
        """The length that is locked."""
        found = self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        self.locks[name] = self.tree.lock(found.last_device_node)
        return int(found.device_prefix_len)

    def unlock(self, name: str) -> None:
        self.tree.unlock(self.locks.pop(name))

    def evict(self, tokens: int) -> int:
        return int(self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def sizes(self) -> list[int]:
        """Evictable and protected tokens."""
        return [self.tree.evictable_size(), self.tree.protected_size()]


if __name__ == "__main__":
    oracle = Oracle()
    names = ("reset", "match", "insert", "lock", "unlock", "evict", "sizes")
    serve({name: getattr(oracle, name) for name in names})
