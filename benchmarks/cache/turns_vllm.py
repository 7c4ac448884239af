"""vLLM's block hashing and BlockPool on the recipe. Runs in .venv-vllm.

Of each turn: hash the prompt's blocks (its default, sha256), look each up, take references, take
new blocks, hash the answer's, enter the new ones in the map, free. One KV group; the scheduler, the
KVCacheManager around the pool and the making of the Request are left out.
"""

from __future__ import annotations

from time import thread_time

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from cache.recipe import BLOCK, clock, grown, idle_sessions
from cache.serve import serve

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)
SAMPLING = SamplingParams(max_tokens=1)


def request_of(name: str, prompt: list[int]) -> Request:
    """Without a hasher: hashing is what is measured."""
    return Request(name, prompt, SAMPLING, None)


def turn_in(pool: BlockPool, request: Request, answer: list[int]) -> float:
    """Seconds of CPU for one turn."""
    started = clock()
    request.block_hashes.extend(HASHER(request))
    blocks = []
    last = (request.num_tokens - 1) // BLOCK
    for digest in request.block_hashes[:last]:
        found = pool.get_cached_block(digest, [0])
        if found is None:
            break
        blocks += found
    pool.touch(blocks)
    hits = len(blocks)
    end = request.num_tokens + len(answer)
    blocks += pool.get_new_blocks(-(-end // BLOCK) - hits)
    request.append_output_token_ids(answer)
    request.block_hashes.extend(HASHER(request))
    pool.cache_full_blocks(request, blocks, hits, end // BLOCK, BLOCK, 0)
    pool.free_blocks(reversed(blocks))
    return thread_time() - started


def turns(context: int, measured: int) -> list[float]:
    """us a turn."""
    pool = BlockPool(2 * context // BLOCK + 1000, enable_caching=True, hash_block_size=BLOCK)
    times = []
    for turn in grown(context, measured):
        spent = turn_in(pool, request_of(str(turn.number), turn.prompt), turn.answer)
        if turn.is_measured:
            times.append(spent * 1e6)
    return times


def evictions(at_once: int) -> list[float]:
    """us a block: new blocks taken from a pool that is full of cached ones."""
    prompts = list(idle_sessions())
    count = sum(len(prompt) // BLOCK for prompt in prompts) + 1
    pool = BlockPool(count, enable_caching=True, hash_block_size=BLOCK)
    for number, prompt in enumerate(prompts):
        turn_in(pool, request_of(str(number), prompt), [])
    times = []
    for _ in range(6000 // at_once):
        started = clock()
        pool.get_new_blocks(at_once)
        times.append((thread_time() - started) * 1e6 / at_once)
    return times


if __name__ == "__main__":
    serve({"turns": turns, "evictions": evictions})
