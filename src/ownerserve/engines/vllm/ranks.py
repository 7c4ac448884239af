"""This module says which ranks an engine core has, and where each keeps what it stores. Pure.

    STORE                       data-parallel rank 0 (also: there is no other)
    STORE/dp-1                  rank 1: an engine core with workers and sessions of its own
      shard-0-of-2              tensor-parallel rank 0 of 2: its heads

A rank that has no siblings writes to its engine core's own directory. One process writes each.
Another number of ranks has other directories, so that nobody reads heads for others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Ranks(msgspec.Struct, frozen=True):
    """`Ranks` are one engine core's place among data-parallel ones, and how many ranks it has of
    its own."""

    data_parallel: int
    tensor: int

    @classmethod
    def of(cls, parallel: Any) -> Ranks:
        """Read vLLM's parallel configuration. A dense model's engine cores are independent, and
        vLLM sets their `data_parallel_rank` back to 0; the index stays."""
        index = getattr(parallel, "data_parallel_index", None)
        known = parallel.data_parallel_rank if index is None else index
        return cls(int(known), int(parallel.tensor_parallel_size))

    def home(self, store: Path) -> Path:
        """Return the directory of this engine core."""
        return home_of(store, self.data_parallel)

    def shard(self, store: Path, rank: int) -> Path:
        """Return the directory of one tensor-parallel rank's store."""
        home = self.home(store)
        return home if self.tensor == 1 else home / f"shard-{rank}-of-{self.tensor}"

    def shards(self, store: Path) -> list[Path]:
        """Return the directories of all tensor-parallel ranks' stores."""
        return [self.shard(store, rank) for rank in range(self.tensor)]


def home_of(store: Path, data_parallel: int) -> Path:
    """Return the directory of a data-parallel rank's engine core."""
    return store / f"dp-{data_parallel}" if data_parallel else store
