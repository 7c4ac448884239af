"""Copies of KV between the reference engine's pools and bytes, at the shapes that users run.

    python benchmarks/hf_copies.py [--rounds N] [--plain]

32 scattered slots of a pool of 128, out of it (`read_many`) and back (`write_many`), one thread,
its CPU time, medians. Beside them in the same round: how it was done before (torch's indexing, and
on the way in a copy that torch could write to), and memcpy of as many bytes into new memory (out)
or into memory that was there (in). The pool lies in a memfd, as a worker's does; `--plain` takes
plain memory, to tell what the memfd itself costs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.states import ComponentTensors, ModelStates, StateTensor
from ownerserve.kv.frame import DENSE, MLA
from ownerserve.kv.specs import Coverage
from ownerserve.kv.units import MIB
from result import Row, larger_is_better, report, smaller_is_better

POOL, SLOTS = 128, 32


class Shape(NamedTuple):
    name: str
    section: str
    parts: dict[str, tuple[int, ...]]
    block: int = 16


SHAPES = (
    Shape(
        "Qwen3-30B-A3B, block 16",
        DENSE,
        dict.fromkeys(("keys", "values"), (48, 16, 4, 128)),
    ),
    Shape("70B, TP8 shard, block 16", DENSE, dict.fromkeys(("keys", "values"), (80, 16, 1, 128))),
    Shape("DeepSeek-V3, block 16", MLA, {"latent": (61, 16, 576)}),
)


class Round(NamedTuple):
    """CPU milliseconds of one round."""

    ours: float
    before: float
    memcpy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plain:
        os.memfd_create = refused  # as in a sandbox that allows none
    rows: list[Row] = []
    for shape in SHAPES:
        rows += measure(shape, rounds=args.rounds)
    report("hf_copies_plain" if args.plain else "hf_copies", rows)


def refused(name: str, flags: int = 0) -> int:
    raise OSError("--plain")


def measure(shape: Shape, *, rounds: int) -> list[Row]:
    parts = tuple(StateTensor(name, dims, torch.bfloat16) for name, dims in shape.parts.items())
    section = ComponentTensors(shape.section, Coverage.RANGE, parts)
    states = ModelStates(block_tokens=shape.block, layers=(), sections=(section,))
    pools = Pools(states, {shape.section: POOL}, state_slots=1, device=torch.device("cpu"))
    pool = pools.component(shape.section)
    order = random.Random(7)
    every = [order.sample(range(POOL), SLOTS) for _ in range(rounds + 1)]
    for slots in (range(first, first + SLOTS) for first in range(0, POOL, SLOTS)):
        noise = np.random.default_rng(1).integers(0, 256, SLOTS * pool.slot_bytes, np.uint8)
        pool.write_many(slots, noise.data)
    rows_of = pool.section_rows(shape.section)
    out, back = [], []
    for slots in every:
        data = pool.read_many(slots)
        assert bytes(data) == bytes(read_before(rows_of, slots))
        flat, goal = np.frombuffer(data, np.uint8), np.empty(len(data), np.uint8)
        goal[:] = flat
        out.append(
            Round(
                spent(lambda at=slots: pool.read_many(at)),
                spent(lambda at=slots: read_before(rows_of, at)),
                spent(flat.copy),
            )
        )
        back.append(
            Round(
                spent(lambda at=slots, given=data: pool.write_many(at, given)),
                spent(lambda at=slots, given=data: write_before(rows_of, at, given)),
                spent(lambda to=goal, given=flat: np.copyto(to, given)),
            )
        )
    size_mib = SLOTS * pool.slot_bytes / MIB
    return [
        row
        for way, taken in (("out", out[1:]), ("in", back[1:]))
        for row in compared(f"{shape.name}, {way}", taken, size_mib)
    ]


def compared(what: str, taken: Sequence[Round], size_mib: float) -> list[Row]:
    ours, before, memcpy = (statistics.median(column) for column in zip(*taken, strict=True))
    rate = size_mib / 1024 * 1e3
    return [
        smaller_is_better(
            f"{what}, {size_mib:.0f} MiB", "ms", ours, other=before, other_name="before"
        ),
        larger_is_better(what, "GiB/s", rate / ours, other=rate / memcpy, other_name="memcpy"),
    ]


def read_before(rows: torch.Tensor, slots: Sequence[int]) -> memoryview:
    """How slots were read: torch's indexing."""
    data: memoryview = rows[list(slots)].cpu().numpy().reshape(-1).data
    return data


def write_before(rows: torch.Tensor, slots: Sequence[int], data: memoryview) -> None:
    """How they were written: a copy that torch could wrap, then torch's indexing."""
    rows[list(slots)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(slots), -1)


def spent(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


if __name__ == "__main__":
    main()
