"""Put a worker together: checkpoint, runner, pools, cache, scheduler, engine. Wiring only."""

from __future__ import annotations

import time

import msgspec
import torch

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.budget import PoolSizes, share_memory
from ownerserve.engines.hf.checkpoint import load_checkpoint
from ownerserve.engines.hf.codec import Codec
from ownerserve.engines.hf.engine import Engine
from ownerserve.engines.hf.loop import StepLoop
from ownerserve.engines.hf.metrics import WorkerMetrics
from ownerserve.engines.hf.openai_api import Facts
from ownerserve.engines.hf.runner import Runner
from ownerserve.engines.hf.scheduler import Scheduler
from ownerserve.engines.hf.status import Identity
from ownerserve.engines.hf.step import Limits
from ownerserve.kv.errors import InvalidInput

CHUNK_BLOCKS = 16
"""Default chunk, in blocks: long enough to keep the device busy, short beside a decode step."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is made from. `block_tokens` and `chunk_tokens` None: the model's default."""

    model: str
    device: str = "cpu"
    kv_bytes: int = 256 << 20
    max_running: int = 16
    max_waiting: int = 1024
    block_tokens: int | None = None
    chunk_tokens: int | None = None
    seed: int = 0


class Worker(msgspec.Struct, frozen=True):
    """Everything a server needs; `sizes` is for people."""

    engine: Engine
    codec: Codec
    facts: Facts
    metrics: WorkerMetrics
    sizes: PoolSizes


def build_worker(options: WorkerOptions) -> Worker:
    """Load the model and allocate its pools; the engine is not started."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("device", "this torch sees no CUDA device", "use --device cpu")
    checkpoint = load_checkpoint(options.model, device=options.device, seed=options.seed)
    runner = Runner(checkpoint.model, block_tokens=options.block_tokens)
    sizes = share_memory(runner.layout, options.kv_bytes, max_running=options.max_running)
    runner.allocate(sizes.slots, sizes.state_slots)
    cache = HeteroCache(runner.layout, sizes.slots, sizes.state_slots)
    limits = _limits(options, runner, sizes)
    facts = Facts(
        model=checkpoint.name,
        vocab_size=runner.vocab_size,
        sequence_tokens=limits.sequence_tokens,
        eos_token_ids=checkpoint.eos_ids,
    )
    codec, metrics = Codec(checkpoint.tokenizer), WorkerMetrics()
    steps = StepLoop(
        runner,
        Scheduler(cache, limits),
        cache=cache,
        decoder=codec,
        identity=Identity(checkpoint.name, time.time_ns(), limits.sequence_tokens),
        metrics=metrics,
    )
    return Worker(Engine(steps), codec, facts, metrics, sizes)


def _limits(options: WorkerOptions, runner: Runner, sizes: PoolSizes) -> Limits:
    block = runner.layout.block_tokens
    chunk = options.chunk_tokens or CHUNK_BLOCKS * block
    ranges = [sizes.slots[name] for name in runner.layout.range_names]
    room = min(ranges) * block if ranges else runner.max_positions
    return Limits(
        chunk_tokens=chunk,
        prefill_tokens_a_step=chunk,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        sequence_tokens=min(room, runner.max_positions),
    )
