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
        for stages in (1, 2, 4)
        for size in (1, 2, 4)
        for shard in Ranks.of(
            parallel(
                data_parallel_index=index,
                pipeline_parallel_size=stages,
                tensor_parallel_size=size,
            )
        ).shards(STORE)
    ]
    assert len(found) == len(set(found)) == 2 * (1 + 2 + 4) * (1 + 2 + 4)


def test_a_stages_ranks_are_below_it() -> None:
    ranks = Ranks(data_parallel=1, tensor=2, stages=2)
    assert ranks.workers == len(ranks.shards(STORE)) == 4
    assert ranks.shard(STORE, 1, 0) == STORE / "dp-1" / "stage-1-of-2" / "shard-0-of-2"
    assert Ranks(data_parallel=0, tensor=1, stages=2).shard(STORE, 1, 0) == STORE / "stage-1-of-2"


def test_what_other_arrangements_have_stored_is_seen(tmp_path: Path) -> None:
    """Every other arrangement sees it, and none sees its own or a sibling's."""
    arrangements = [Ranks(0, tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2, 4)]
    assert arrangements[0].others(tmp_path) == []
    for ranks in arrangements:
        for shard in ranks.shards(tmp_path):
            (shard / "segments").mkdir(parents=True)
    for ranks in arrangements:
        assert {*ranks.others(tmp_path)} == {*arrangements} - {ranks}
        assert len(ranks.others(tmp_path)) == len(arrangements) - 1
    assert Ranks(1, 1).others(tmp_path) == []
