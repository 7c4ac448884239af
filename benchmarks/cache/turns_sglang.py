"""SGLang's radix caches on the recipe. Runs in .venv-sglang.

Of each turn, the least that its scheduler does: match the prompt, lock, insert prompt and answer,
unlock. Arrays of tokens and the tensor of slots are made outside the clock; writing the request's
row, checkpoints and the second insert at the prompt's end are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from time import thread_time

from cache.recipe import BLOCK, clock, grown, idle_sessions
from cache.serve import serve
from cache.sglang_import import Allocator, stub_torchvision

stub_torchvision()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    BasePrefixCache,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

torch.set_num_threads(1)


def rust() -> BasePrefixCache:
    """The default of 0.5.23: UnifiedRadixCache on the Rust core, one component."""
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=Allocator(BLOCK),
            page_size=BLOCK,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
    )


def classic() -> BasePrefixCache:
    """RadixCache, all Python."""
    return RadixCache.create_simulated(mock_allocator=Allocator(BLOCK), page_size=BLOCK)


CORES: dict[str, Callable[[], BasePrefixCache]] = {"rust": rust, "python": classic}


def turns(core: str, context: int, measured: int) -> list[float]:
    """us a turn."""
    cache = CORES[core]()
    times = []
    for turn in grown(context, measured):
        prompt = array("q", turn.prompt)
        whole = array("q", turn.prompt + turn.answer)
        pages = len(whole) // BLOCK * BLOCK
        slots = torch.arange(pages)
        started = clock()
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        lock = cache.lock(found.last_device_node)
        cache.insert(
            InsertParams(
                key=RadixKey(whole).page_aligned(BLOCK),
                value=slots,
                prev_prefix_len=found.device_prefix_len,
            )
        )
        cache.unlock(lock)
        if turn.is_measured:
            times.append((thread_time() - started) * 1e6)
    return times


def evictions(core: str, at_once: int) -> list[float]:
    """us a page, asking for `at_once` pages a call. Whole nodes go, so it frees more."""
    cache = CORES[core]()
    for prompt in idle_sessions():
        # As grown by turns: a node for every turn.
        for end in range(BLOCK * 10, len(prompt) + 1, BLOCK * 10):
            key = RadixKey(array("q", prompt[:end]))
            cache.insert(InsertParams(key=key, value=torch.arange(end)))
    times = []
    for _ in range(60):
        started = clock()
        freed = cache.evict(EvictParams(num_tokens=at_once * BLOCK)).num_tokens_evicted
        times.append((thread_time() - started) * 1e6 / (freed / BLOCK))
    return times


if __name__ == "__main__":
    serve({"turns": turns, "evictions": evictions})
