"""This module says which ranks an engine core has, and where each keeps what it stores. Pure.

    STORE                       data-parallel rank 0 (also: there is no other)
    STORE/dp-1                  rank 1: an engine core with workers and sessions of its own
      stage-0-of-2              pipeline stage 0 of 2: its layers
        shard-0-of-2            tensor-parallel rank 0 of 2: its heads

A rank that has no siblings of a kind has no directory for that kind. One process writes each.
Another number of ranks has other directories, so that nobody reads heads or layers for others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Ranks(msgspec.Struct, frozen=True):
    """`Ranks` are one engine core's place among data-parallel ones, and how many pipeline stages
    and tensor-parallel ranks in each it has of its own."""

    data_parallel: int
    tensor: int
    stages: int = 1

    @classmethod
    def of(cls, parallel: Any) -> Ranks:
        """Read vLLM's parallel configuration. A dense model's engine cores are independent, and
        vLLM sets their `data_parallel_rank` back to 0; the index stays."""
        index = getattr(parallel, "data_parallel_index", None)
        known = parallel.data_parallel_rank if index is None else index
        stages = int(getattr(parallel, "pipeline_parallel_size", 1))
        return cls(int(known), int(parallel.tensor_parallel_size), stages)

    @property
    def workers(self) -> int:
        """`workers` counts the processes that hold a part of a sequence's state."""
        return self.stages * self.tensor

    def home(self, store: Path) -> Path:
        """Return the directory of this engine core."""
        return home_of(store, self.data_parallel)

    def shard(self, store: Path, stage: int, rank: int) -> Path:
        """Return the directory of the store of one tensor-parallel rank of a stage."""
        at = self.home(store)
        at = at if self.stages == 1 else at / f"stage-{stage}-of-{self.stages}"
        return at if self.tensor == 1 else at / f"shard-{rank}-of-{self.tensor}"

    def shards(self, store: Path) -> list[Path]:
        """Return the directories of all workers' stores, stage by stage."""
        return [
            self.shard(store, stage, rank)
            for stage in range(self.stages)
            for rank in range(self.tensor)
        ]

    def others(self, store: Path) -> list[Ranks]:
        """Return the other arrangements that have stored state in this engine core's directory,
        where this one does not look."""
        home = self.home(store)
        found = set()
        for stage in (home, *home.glob("stage-0-of-*")):
            for shard in (stage, *stage.glob("shard-0-of-*")):
                if (shard / "segments").is_dir():
                    tensor = _count(shard) if shard != stage else 1
                    stages = _count(stage) if stage != home else 1
                    found.add(Ranks(self.data_parallel, tensor, stages))
        return sorted(found - {self}, key=lambda ranks: (ranks.stages, ranks.tensor))


def _count(directory: Path) -> int:
    """Return N of a name like shard-0-of-N; 1 where there is none."""
    count = directory.name.rpartition("-")[2]
    return int(count) if count.isdecimal() else 1


def home_of(store: Path, data_parallel: int) -> Path:
    """Return the directory of a data-parallel rank's engine core."""
    return store / f"dp-{data_parallel}" if data_parallel else store
