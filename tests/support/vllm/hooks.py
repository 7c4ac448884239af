"""What a test does inside a worker: faults and probes. Each takes the Worker first.

Never used to make a connector pass: only to break what it restored, or to look.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import random
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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


def watch_pages(worker: Any, *, tokens: int) -> None:
    """From here on, digests of what every layer reads of a request's blocks before `tokens`, taken
    when the request ends: `pages`."""
    manager = worker.scheduler.kv_cache_manager
    free = manager.free
    worker.pages = {}

    def watched(request: Any, *arguments: Any, **options: Any) -> Any:
        tables = manager.get_block_ids(request.request_id)
        worker.pages[request.request_id] = _digests(worker, tables, tokens)
        return free(request, *arguments, **options)

    manager.free = watched


def pages(worker: Any) -> dict[str, dict[str, list[str]]]:
    """By request, then by layer: a digest for each block, "" where the engine has let it go."""
    return dict(worker.pages)


def _digests(worker: Any, tables: Any, tokens: int) -> dict[str, list[str]]:
    """Straight from the allocation, by the places that vLLM gave its layers; no padding."""
    config = worker.core.model_executor.driver_worker.worker.model_runner.kv_cache_config
    table, held, memory = {}, {}, None
    for group, blocks in zip(config.kv_cache_groups, tables, strict=True):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            own = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            table[name] = blocks[: tokens // own.block_size]
            held[name] = own.real_page_size_bytes
            for tensor in _tensors(worker, [name]):
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                memory.set_(tensor.untyped_storage())
    found: dict[str, list[str]] = {}
    for place in config.kv_cache_tensors:
        for index, name in enumerate(place.layers):
            starts = [
                place.offset + index * place.layer_stride + block * place.block_stride
                for block in table[name]
            ]
            found[name] = [
                hashlib.sha256(memory[at : at + held[name]].cpu().numpy().tobytes()).hexdigest()
                if block
                else ""
                for at, block in zip(starts, table[name], strict=True)
            ]
    return found


def fill_kv_bytes(worker: Any) -> int:
    """Bytes of one token's KV over all layers of the full-attention groups."""
    total = 0
    for group in worker.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec"):
            total += len(group.layer_names) * spec.page_size_bytes // spec.block_size
    return total


def scatter_free_blocks(worker: Any, *, seed: int) -> None:
    """Take all free blocks of the engine's pool and free them in a random order, as sessions that
    came and went side by side leave them: no block follows another."""
    pool = worker.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    random.Random(seed).shuffle(blocks)
    pool.free_blocks(blocks)


def skip_attention(worker: Any) -> None:
    """From here on, attention gives zeros, at once: 32k tokens are filled in a second or two. KV is
    written, stored and read as ever, of made-up values."""
    from vllm.v1.attention.backends import cpu_attn

    def zeros(*, output: torch.Tensor, **_: Any) -> None:
        output.zero_()

    cpu_attn.ops.cpu_attention_with_kv_cache = zeros


def connector_status(worker: Any) -> Any:
    """What the connector under test says of itself; None when it has no `status`."""
    status = getattr(worker.scheduler.connector, "status", None)
    gc.collect()
    return status() if status is not None else None


def watch_preemptions(worker: Any) -> None:
    """From here on, note each preemption: `preemptions`."""
    scheduler = worker.scheduler
    preempt = scheduler._preempt_request  # noqa: SLF001 - vLLM tells nobody of them
    worker.preempted = {}

    def watched(request: Any, *arguments: Any, **options: Any) -> Any:
        known = worker.preempted.setdefault(request.request_id, [])
        known.append(request.num_output_tokens)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = watched  # noqa: SLF001


def preemptions(worker: Any) -> dict[str, list[int]]:
    """By request: how much of its answer was known each time."""
    return dict(worker.preempted)


def count_unanswered(worker: Any) -> None:
    """From the next step on, count how often the connector lets a request wait: `unanswered`. A
    quiet engine has all the time for other threads' answers."""
    from ownerserve.engines.vllm.scheduler_side import scheduler

    scheduler.QUIET_WAIT_S = 60.0
    connector = worker.scheduler.connector
    matched, worker.unanswered = connector.get_num_new_matched_tokens, 0

    def counted(request: Any, hit: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = matched(request, hit)
        worker.unanswered += answer[0] is None
        return answer

    connector.get_num_new_matched_tokens = counted


def unanswered(worker: Any) -> int:
    return int(worker.unanswered)


def empty_store(worker: Any) -> int:
    """The store on disk gives up all its records, as it does for others; how many."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # From inside an engine there is no other way to the store.
    disk = get_kv_transfer_group()._worker._backing.tiers.tiers[-1]  # noqa: SLF001
    return int(disk.core.evict([entry.meta.id for entry in disk.core.index.walk()]))


def slow_commits(worker: Any, *, seconds: float) -> None:
    """From here on the drive takes so long to make records durable."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tiers = get_kv_transfer_group()._worker._tiers  # noqa: SLF001 - as above
    commit = tiers.commit

    def slow(reservations: Any) -> Any:
        time.sleep(seconds)
        return commit(reservations)

    tiers.commit = slow


def reset_connector(worker: Any) -> bool:
    """As vLLM does when weights are others from now on."""
    return bool(worker.engine.reset_prefix_cache(reset_connector=True))


def time_hooks(worker: Any) -> None:
    """From here on, add up what the connector's hooks take, on both sides: `hook_cpu_ms`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker.hook_ns, worker.hook_calls, worker.inside = Counter(), Counter(), False
    sides = [worker.scheduler.connector]
    sides += [get_kv_transfer_group()] if has_kv_transfer_group() else []
    for side in filter(None, sides):
        for name in dir(type(side)):
            attribute = inspect.getattr_static(type(side), name)
            if not name.startswith("_") and inspect.isfunction(attribute):
                setattr(side, name, _timed(worker, name, getattr(side, name)))


def _timed(worker: Any, name: str, hook: Any) -> Any:
    def timed(*arguments: Any, **options: Any) -> Any:
        if worker.inside:  # a hook that calls another
            return hook(*arguments, **options)
        worker.inside = True
        start = time.thread_time_ns()
        try:
            return hook(*arguments, **options)
        finally:
            worker.hook_ns[name] += time.thread_time_ns() - start
            worker.hook_calls[name] += 1
            worker.inside = False

    return timed


def hook_cpu_ms(worker: Any) -> dict[str, float]:
    """CPU of the engine's thread inside each hook since `time_hooks`, less what timing costs."""
    start = time.thread_time_ns()
    for _ in range(1000):
        time.thread_time_ns()
    clock_ns = (time.thread_time_ns() - start) / 1000
    spent = {
        name: (ns - clock_ns * worker.hook_calls[name]) / 1e6 for name, ns in worker.hook_ns.items()
    }
    worker.hook_ns.clear()
    worker.hook_calls.clear()
    return spent


def why_bypassed(worker: Any) -> dict[str, str | None]:
    """What our connector says of vLLM's own requests of each kind."""
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    from ownerserve.engines.vllm.identity import why_bypassed

    image = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="i",
        mm_position=PlaceholderRange(offset=0, length=2),
        mm_hash="h",
    )
    remote = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "lora": {"lora_request": LoRARequest("adapter", 1, "/adapter")},
        "multimodal": {"mm_features": [image]},
        "embeddings": {"prompt_embeds": torch.zeros(3, 4), "prompt_token_ids": None},
        "pooling": {"pooling_params": PoolingParams(), "sampling_params": None},
        "streaming": {"resumable": True},
        "handed_over": {"sampling_params": remote},
    }
    found = {}
    for kind, fields in kinds.items():
        own = {"prompt_token_ids": [1, 2, 3], "sampling_params": SamplingParams(), **fields}
        own = {"pooling_params": None, **own}
        found[kind] = why_bypassed(Request(request_id=kind, **own))
    return found


def drafts(worker: Any) -> dict[str, int]:
    """Tokens drafted since `count_drafts`, and how many of them were right."""
    return dict(worker.drafts)


def count_drafts(worker: Any) -> None:
    """Count drafted and accepted tokens from here on."""
    worker.drafts = Counter()
    scheduler = worker.scheduler
    update = scheduler.update_from_output

    def counted(scheduler_output: Any, model_runner_output: Any) -> Any:
        proposed = scheduler_output.scheduled_spec_decode_tokens
        for request_id, tokens in proposed.items():
            at = model_runner_output.req_id_to_index.get(request_id)
            if at is not None and (sampled := model_runner_output.sampled_token_ids[at]):
                worker.drafts["drafted"] += len(tokens)
                worker.drafts["accepted"] += len(sampled) - 1
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = counted


def play_policy(worker: Any, *, ours: str) -> dict[str, Any]:
    """What of a session of 4 chunks is left in a room for 10 after a prompt of 9 that nobody
    continues: the session was stored by one request and used by another."""
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    module = "ownerserve.engines.vllm.offload_policy"
    policy = CachePolicyFactory.get_cache_policy_cls(ours, module)(10)
    context = types.SimpleNamespace(get_offload_key_position=lambda key: key[1])

    def request(keys: list[bytes]) -> None:
        reused = {key for key in keys if policy.get(key) is not None}
        fresh = [key for key in keys if key not in reused]
        room = 10 - sum(policy.get(key) is not None for key in everything)
        if len(fresh) > room:
            evicted = policy.evict(len(fresh) - room, set(keys))
            assert evicted is not None and len(evicted) == len(fresh) - room
        for number, key in enumerate(fresh):
            chunk = ChunkStatus(number)
            policy.insert(key, chunk)
            chunk.ref_cnt = 0
            policy.mark_evictable(key)
        policy.on_request_finished([keys], set(fresh), reused, context)

    session = [bytes((1, at)) for at in range(4)]
    scan = [bytes((2, at)) for at in range(9)]
    everything = session + scan
    request(session)
    request(session)
    request(scan[:6])
    for at in range(6, 9):
        request(scan[at : at + 1])
    pinned = policy.get(session[0])
    if pinned is not None:
        pinned.ref_cnt = 1
        policy.mark_non_evictable(session[0])
    refused = policy.evict(10, set())
    left = [key[1] for key in session if policy.get(key) is not None]
    return {"session": left, "refused": refused is None}


def sleep_and_wake(worker: Any) -> None:
    """As `POST /sleep?level=1` and `/wake_up` do: weights are kept, the cache is not."""
    worker.engine.sleep(1)
    worker.engine.wake_up()


def sleep_deeply(worker: Any) -> None:
    """As `POST /sleep?level=2` does: weights are thrown away."""
    worker.engine.sleep(2)
    worker.engine.wake_up()


def reload_weights(worker: Any) -> None:
    worker.engine.collective_rpc("reload_weights")


def double_weights(worker: Any) -> None:
    """As a trainer does that sends a function to the workers."""
    worker.engine.collective_rpc(_double)


def _double(worker: Any) -> None:
    for parameter in worker.model_runner.model.parameters():
        parameter.data.mul_(2)


def ask_workers_anything(worker: Any) -> None:
    """A call that we don't know, of a method that somebody added to the worker."""
    worker.core.model_executor.driver_worker.worker.update_as_i_like = lambda: None
    worker.engine.collective_rpc("update_as_i_like")


def ask_workers_in_passing(worker: Any) -> None:
    """Calls that leave weights as they are, and a reset."""
    worker.engine.collective_rpc("check_health")
    worker.engine.collective_rpc("reset_mm_cache")
    reset_connector(worker)


def name_of(worker: Any, *, model: str, engine_args: dict[str, Any]) -> str:
    """What state would be called in an engine that is started so: vLLM's own reading of it."""
    from vllm.engine.arg_utils import EngineArgs

    from ownerserve.engines.vllm.identity import identity_of
    from ownerserve.kv.frame import Payload
    from tests.support.vllm.worker import DEFAULTS

    arguments = {**DEFAULTS, **engine_args}
    if "overriding_function" in arguments:
        arguments["hf_overrides"] = _double_epsilon
        del arguments["overriding_function"]
    config = EngineArgs(model=model, **arguments).create_engine_config()
    cache = Path(model) / "digests.json"
    named = identity_of(config, Payload(32, (), ()), weights="", cache=cache)
    return str(named.digest().hex())


def _double_epsilon(config: Any) -> Any:
    config.rms_norm_eps = 2 * getattr(config, "rms_norm_eps", 0.0)  # vLLM tries it on a bare one
    return config


def cpu_s(worker: Any) -> float:
    """The CPU seconds that the worker's process has taken, all threads."""
    return time.process_time()


def clock_s(worker: Any) -> float:
    """The worker's own clock."""
    return time.monotonic()


def terminate(worker: Any, *, timeout_s: int) -> None:
    """End as an engine core does after SIGTERM, by vLLM's own rule of when it may go; then the
    process exits."""
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    core = worker.core
    core.vllm_config.shutdown_timeout = timeout_s
    core.shutdown_state, core.engines_running = EngineShutdownState.REQUESTED, False
    core.has_work = types.MethodType(EngineCoreProc.has_work, core)
    core._send_abort_outputs = lambda _: None  # noqa: SLF001 - no client waits for them
    until_s = time.monotonic() + timeout_s
    while EngineCoreProc._handle_shutdown(core) and time.monotonic() < until_s:  # noqa: SLF001
        core.step_fn()
    worker.do_shutdown()
