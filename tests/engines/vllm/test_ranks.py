"""Which ranks an engine core has, and where each keeps what it stores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ownerserve.engines.vllm.ranks import Ranks, home_of


def parallel(**changes: int) -> Any:
    plain = {
        "data_parallel_rank": 0,
        "data_parallel_index": 0,
        "tensor_parallel_size": 1,
    }
    return SimpleNamespace(**(plain | changes))


STORE = Path("/data/kv")


def test_one_rank_writes_to_the_store_itself() -> None:
    ranks = Ranks.of(parallel())
    assert (ranks.home(STORE), ranks.shards(STORE)) == (STORE, [STORE])


def test_a_dense_models_engine_cores_are_told_apart_by_their_index() -> None:
    """vLLM sets the rank of each back to 0; a mixture of experts keeps it."""
    dense, experts = parallel(data_parallel_index=1), parallel(data_parallel_rank=1)
    experts.data_parallel_index = 1
    assert Ranks.of(dense).home(STORE) == Ranks.of(experts).home(STORE) == STORE / "dp-1"
    assert Ranks.of(dense).home(STORE) == home_of(STORE, 1)


def test_no_two_arrangements_share_a_directory() -> None:
    """Whoever has other heads looks elsewhere: a miss."""
    found = [
        shard
        for index in (0, 1)
        for size in (1, 2, 4)
        for shard in Ranks.of(
            parallel(data_parallel_index=index, tensor_parallel_size=size)
        ).shards(STORE)
    ]
    assert len(found) == len(set(found)) == 2 * (1 + 2 + 4)
