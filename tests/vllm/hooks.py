"""What a test does inside a worker: faults and probes. Each takes the Worker first.

Never used to make a connector pass: only to break what it restored, or to look.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch


def corrupt_restored(worker: Any, *, group: int | None = None, value: float = 0.5) -> None:
    """Overwrite the KV of every request that starts with computed tokens, before its first forward.

    The control of the oracle: with it an answer must be told from a cold one. `group`: only that
    KV cache group, to show that each group's state matters.
    """
    runner = worker.core.model_executor.driver_worker.worker.model_runner
    forward = runner.execute_model

    def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if request.num_computed_tokens:
                _overwrite(worker, request, group, value)
        return forward(scheduler_output, *arguments, **options)

    runner.execute_model = execute_model


def _overwrite(worker: Any, request: Any, group: int | None, value: float) -> None:
    groups = worker.scheduler.kv_cache_config.kv_cache_groups
    for index, blocks in enumerate(request.block_ids):
        if group in (None, index):
            size = groups[index].kv_cache_spec.block_size
            covered = [b for b in blocks[: -(-request.num_computed_tokens // size)] if b]
            for tensor in _tensors(worker, groups[index].layer_names):
                tensor[covered] = value


def _tensors(worker: Any, layers: list[str]) -> Iterator[torch.Tensor]:
    """Cache tensors of layers, block id first; a recurrent layer has several."""
    context = worker.engine.vllm_config.compilation_config.static_forward_context
    for layer in layers:
        caches = context[layer].kv_cache
        yield from caches if isinstance(caches, (list, tuple)) else [caches]


def fill_kv_bytes(worker: Any) -> int:
    """Bytes of one token's KV over all layers of the full-attention groups."""
    total = 0
    for group in worker.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec"):
            total += len(group.layer_names) * spec.page_size_bytes // spec.block_size
    return total


def connector_status(worker: Any) -> Any:
    """What the connector under test says of itself; None when it has no `status`."""
    status = getattr(worker.scheduler.connector, "status", None)
    gc.collect()
    return status() if status is not None else None


def count_preemptions(worker: Any) -> None:
    """Count the scheduler's preemptions from here on."""
    scheduler = worker.scheduler
    preempt = scheduler._preempt_request
    worker.preemptions = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        worker.preemptions += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted


def preemptions(worker: Any) -> int:
    return int(worker.preemptions)
