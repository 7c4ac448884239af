"""Rates of copies on PACKED_DEVICE: a record of 1,024 tokens out of blocks into page-locked host
memory and back, through the connector's own codec and streams, beside a plain copy of as many bytes
between the same two. On a CPU it runs too, for the sake of being run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.shape import describe
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.engines.vllm.worker_side.streams import host_runtime, stream_of
from ownerserve.kv.frame import DENSE
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.pinned import PinnedMemory
from tests.support.vllm_parts import specs

DEVICE = torch.device(os.environ.get("PACKED_DEVICE", "cpu"))
LAYERS, HEADS, DIM, BLOCK, TOKENS, RECORDS = 48, 4, 128, 16, 1024, 4
"""Qwen3-30B-A3B's, in LBNHC."""
ROUNDS = 9


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_s(call: Callable[[], Any]) -> float:
    took = []
    for number in range(ROUNDS + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        if number:
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    blocks = RECORDS * TOKENS // BLOCK + 1
    memory = torch.zeros(
        (LAYERS, blocks, BLOCK, HEADS, 2 * DIM), dtype=torch.bfloat16, device=DEVICE
    )
    memory += torch.arange(blocks, device=DEVICE).view(1, -1, 1, 1, 1) % 256
    names = specs.layers(*range(LAYERS))
    caches = {name: memory[n].transpose(1, 2) for n, name in enumerate(names)}
    spec = specs.FullAttentionSpec(BLOCK, HEADS, DIM, torch.bfloat16)
    config = specs.Config([specs.Group(names, spec)], num_blocks=blocks)
    shape = describe(config)
    codec = PageCodec(shape, caches, num_blocks=blocks, key_orders={DENSE: None})
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
    count = TOKENS // BLOCK
    place = BlockPlace(DENSE, (tuple(order[:count].tolist()),), 0, TOKENS)
    goal = BlockPlace(DENSE, (tuple(order[count : 2 * count].tolist()),), 0, TOKENS)
    cuda = host_runtime(DEVICE)
    pool = BufferPool(memory=PinnedMemory(cuda) if cuda else None)
    record = pool.take(codec.size(place))
    host = torch.frombuffer(record, dtype=torch.uint8)
    plain = memory.view(-1).view(torch.uint8)[: len(host)]
    streams = stream_of(DEVICE)

    def save() -> None:
        with streams.copying_out(streams.mark()):
            codec.read(place, record)

    def load() -> None:
        with streams.copying_in(streams.mark()):
            codec.write(goal, record)

    save()
    load()
    held = torch.cuda.max_memory_allocated() if cuda else 0
    rate = len(host) / 1e9
    out, into = rate / median_s(save), rate / median_s(load)
    grown = (torch.cuda.max_memory_allocated() if cuda else 0) - held
    same = torch.equal(memory[:, goal.blocks[0]], memory[:, place.blocks[0]])
    copy_out = rate / median_s(lambda: host.copy_(plain, non_blocking=True))
    copy_in = rate / median_s(lambda: plain.copy_(host, non_blocking=True))
    print(
        json.dumps(
            {
                "device": DEVICE.type,
                "record_bytes": len(host),
                "save_gb_s": out,
                "load_gb_s": into,
                "plain_out_gb_s": copy_out,
                "plain_in_gb_s": copy_in,
                "grown_bytes": grown,
                "same": same,
            }
        )
    )


if __name__ == "__main__":
    main()
