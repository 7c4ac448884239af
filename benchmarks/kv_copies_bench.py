"""Copies of KV between vLLM's pages and records, at the shapes that users run, beside memcpy.

    python benchmarks/kv_copies_bench.py [--rounds N] [--only WORD] [--by loops|numpy]

A record of 1,024 tokens of full attention goes out of pages and back into them, by the connector's
own codec, on one thread. Pages are allocated as vLLM allocates them (one tensor), in a pool of four
records; the record's memory is the store's own buffer. Each round takes another quarter of the
pool, so that nothing is read from a cache: blocks one after another, or all of the pool in any
order. Beside it, in the same round: memcpy of as many bytes between the same two memories, and
torch's `index_select` and `copy_` a layer and part at a time. CPU time of the thread, medians.
By compiled loops, in vLLM's environment, which has Numba; `--by numpy`: as where there is none.

`vLLM on a GPU` are layouts by their names in 0.32 (LBNHC is the default); `vLLM on a CPU` has keys
in tiles, which no copy of whole rows can serve.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from ownerserve.engines.vllm.layout import codec as codec_module
from ownerserve.engines.vllm.layout import copies
from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.shape import describe
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.frame import DENSE
from ownerserve.store.tiers.buffers import BufferPool
from result import Row, report

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LOOPS = ("rows", "turn")
TOKENS, QUARTERS = 1024, 4
GOAL = 0.6
ORDERS = {"LBNHC": (0, 1, 3, 2, 4), "LBHNC": (0, 1, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}
CPU = "vLLM on a CPU"
TILE = 32


class Shape(NamedTuple):
    name: str
    layers: int
    heads: int
    dtype: torch.dtype
    block: int
    boundary: int
    layout: str = "LBNHC"
    dim: int = 128


QWEN = ("Qwen3-30B-A3B, block 16", 48, 4, torch.bfloat16, 16, 32)
SHAPES = (
    Shape("the first benchmark, block 32", 8, 8, torch.float32, 32, 32),
    Shape(*QWEN),
    Shape("70B, TP8 shard, block 16", 80, 1, torch.bfloat16, 16, 32),
    Shape("Qwen3-30B-A3B, boundary 256", 48, 4, torch.bfloat16, 16, 256),
    Shape(*QWEN, layout="LBHNC"),
    Shape(*QWEN, layout="BLNHC"),
    Shape("Qwen3-30B-A3B, block 128", 48, 4, torch.bfloat16, 128, 128, layout=CPU),
    Shape("the first benchmark, block 32", 8, 8, torch.float32, 32, 32, layout=CPU),
)


class FullAttentionSpec(SimpleNamespace):
    """What the codec reads of vLLM's spec."""


class Pool:
    """vLLM's pages of one model, a codec over them, and a record's memory."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.blocks = QUARTERS * TOKENS // shape.block
        order = ORDERS.get(shape.layout, ORDERS["LBHNC"])
        sizes = (shape.layers, self.blocks, shape.heads, shape.block, 2 * shape.dim)
        self.memory = torch.zeros([sizes[axis] for axis in order], dtype=shape.dtype)
        self.memory += 1  # every page is there
        views = self.memory.permute([order.index(axis) for axis in range(len(order))])
        names = [f"model.layers.{n}.attn" for n in range(shape.layers)]
        self.views = views
        spec = FullAttentionSpec(
            block_size=shape.block,
            num_kv_heads=shape.heads,
            head_size=shape.dim,
            head_size_v=None,
            dtype=shape.dtype,
        )
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        config = SimpleNamespace(kv_cache_groups=[group], num_blocks=self.blocks)
        self.state = describe(config, block_tokens=shape.boundary)
        keys = None
        if shape.layout == CPU:
            plain = torch.arange(shape.block * shape.dim).view(-1, TILE, shape.dim)
            keys = plain.transpose(1, 2).reshape(-1).tolist()
        self.codec = PageCodec(
            self.state,
            dict(zip(names, views, strict=True)),
            num_blocks=self.blocks,
            key_orders={DENSE: keys},
        )
        self.size = self.state.components[DENSE].section.unit_bytes * (TOKENS // shape.boundary)
        self.record = BufferPool().take(self.size)
        np.frombuffer(self.record, np.uint8)[:] = 1

    def places(self, order: Sequence[int]) -> list[BlockPlace]:
        count = self.blocks // QUARTERS
        return [
            BlockPlace(DENSE, (tuple(order[at * count : (at + 1) * count]),), 0, TOKENS)
            for at in range(QUARTERS)
        ]

    def memcpy(self, quarter: int, *, into: str) -> None:
        pages = self.memory.data_ptr() + quarter * self.size
        record = np.frombuffer(self.record, np.uint8).ctypes.data
        goal, source = (record, pages) if into == "record" else (pages, record)
        ctypes.memmove(goal, source, self.size)

    def by_torch(self, place: BlockPlace, *, into: str) -> None:
        """What torch has for it: blocks by their list, one layer and part after another."""
        shape, ids = self.shape, torch.tensor(place.blocks[0])
        units, count = TOKENS // shape.boundary, shape.boundary // shape.block
        record = torch.frombuffer(self.record, dtype=shape.dtype)
        frame = record.view(units, 2, shape.layers, count, shape.block, shape.heads, shape.dim)
        for layer in range(shape.layers):
            for part in range(2):
                pages = self.views[layer][..., part * shape.dim : (part + 1) * shape.dim]
                pages = pages.transpose(1, 2)
                piece = frame[:, part, layer]
                if into == "record":
                    piece.copy_(pages.index_select(0, ids).view(piece.shape))
                else:
                    pages.index_copy_(0, ids, piece.reshape(len(ids), *piece.shape[2:]))


def seconds(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


class Counted:
    """How many calls moved bytes."""

    def __init__(self, module: ModuleType, names: Sequence[str]) -> None:
        self.calls = 0
        for name in names:
            setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            self.calls += 1
            return call(*given, **more)

        return counted


def rows_of(shape: Shape, counted: Counted, *, rounds: int) -> list[Row]:
    pool, rows = Pool(shape), []
    in_order = list(range(pool.blocks))
    shuffled = random.Random(7).sample(in_order, len(in_order))
    for how, order in (("contiguous", in_order), ("fragmented", shuffled)):
        places = pool.places(order)
        for into, call in (("record", pool.codec.read), ("pages", pool.codec.write)):
            ours, plain, torchs, ratios = [], [], [], []
            for number in range(rounds + 1):
                place = places[number % QUARTERS]
                counted.calls = 0
                own = seconds(lambda c=call, p=place: c(p, pool.record))
                calls = counted.calls
                copy = seconds(lambda n=number, i=into: pool.memcpy(n % QUARTERS, into=i))
                if number and shape.layout != CPU and number <= 4:
                    torchs.append(seconds(lambda p=place, i=into: pool.by_torch(p, into=i)))
                if number:  # the first one maps memory
                    ours.append(own)
                    plain.append(copy)
                    ratios.append(copy / own)
            own, copy = statistics.median(ours), statistics.median(plain)
            what = f"{shape.name}, {shape.layout}, {how}, into {into} ({pool.size / 1e6:.0f} MB)"
            goal = f">= {GOAL}" if shape.layout != CPU else ""
            rate = pool.size / 1e9
            rows.append(Row(what, "GB/s", rate / own, rate / copy, "memcpy", copy / own, goal))
            if torchs:
                theirs = statistics.median(torchs)
                rows.append(Row(what, "GB/s", rate / own, rate / theirs, "torch", theirs / own, ""))
            most = 2 * shape.layers
            bound = f"<= {most}" if shape.layout != CPU else ""
            rows.append(Row(f"{what}: calls", "calls", calls, None, "", None, bound))
            print(
                f"{what}: {rate / own:.1f} of {rate / copy:.1f} GB/s, {copy / own:.2f}"
                f" ({min(ratios):.2f} to {max(ratios):.2f}), {calls} calls",
                file=sys.stderr,
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--only", default="", help="shapes whose name has this word")
    parser.add_argument("--by", choices=("loops", "numpy"), default="loops")
    options = parser.parse_args()
    if options.by == "loops" and importlib.util.find_spec("numba") is None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
        os.execve(VLLM_PYTHON, [str(VLLM_PYTHON), *sys.argv], environment)
    torch.set_num_threads(1)
    rows = list[Row]()
    if options.by == "loops":
        counted = Counted(importlib.import_module(f"{copies.__package__}.compiled"), LOOPS)
    else:
        codec_module.host_copies = copies.HostCopies
        counted = Counted(copies, ("take", "put", "move"))
    for shape in SHAPES:
        if options.only in shape.name:
            rows += rows_of(shape, counted, rounds=options.rounds)
    own = [row.ratio or 0 for row in rows if row.goal == f">= {GOAL}"]
    if own:
        mean = math.exp(sum(map(math.log, own)) / len(own))
        rows.append(Row("share of memcpy, geometric mean", "ratio", mean, None, "", None, ""))
    report("kv_copies_bench", rows, others={"torch": str(torch.__version__), "by": options.by})
    return 0


if __name__ == "__main__":
    sys.exit(main())
