"""This module holds what differs between vLLM versions, asked of the installed one by attribute.
0.30 to 0.32.

Nothing else in this package looks at a version. Imports vLLM only inside functions, so that the
pure parts are tested without it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol

from ownerserve.engines.vllm.served import NotServed
from ownerserve.engines.vllm.weights import KEEPS_WEIGHTS, WorkerCall
from ownerserve.engines.vllm.worker_commands import Tables
from ownerserve.kv.errors import InvalidInput
from ownerserve.node.storage.model_config import canonical

MAMBA_PROBE = (3, 5)
"""A key and a value dimension that can't be confused."""


def register_connector(name: str, *, module: str) -> None:
    """Give vLLM's connector factory a class by its name, unless it has one of this name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The factory says "already registered" by this exception alone.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(name, module, name)


def version() -> str:
    """Return the installed vLLM's version."""
    import vllm

    return str(vllm.__version__)


MEDIA_PACKAGES = ("transformers", "torchvision", "pillow")


def media_versions() -> tuple[str, ...]:
    """Return the versions of what prepares images; transformers takes another way where there is
    no torchvision."""
    found = [version()]
    for package in MEDIA_PACKAGES:
        try:
            found.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            found.append("")
    return tuple(found)


def quantization_of(model: Any) -> str:
    """Return how vLLM quantises the weights: the method that it settled on, what the operator gave
    for it, and what the checkpoint says of its own; empty where it does not."""
    method = getattr(model, "quantization", None)
    own = getattr(model.hf_text_config, "quantization_config", None)
    own = own or getattr(model.hf_config, "quantization_config", None)
    given = getattr(model, "quantization_config", None)
    if not (method or own or given):
        return ""
    parts = (
        f"{name} {canonical(value)}" for name, value in (("own", own), ("given", given)) if value
    )
    return " ".join([str(method), *parts])


def hear_worker_calls(vllm_config: Any, heard: Callable[[WorkerCall], None]) -> bool:
    """Let `heard`, a method, know each call that this process makes to vLLM's workers, before it is
    made and as long as the method's object lives. Return False where vLLM has no such place.

    All calls pass `collective_rpc` of the executor's class: in 0.30 to 0.32 nothing tells a
    connector that weights were updated, reloaded or put to sleep.
    """
    try:
        from vllm.v1.executor import Executor

        kind = Executor.get_class(vllm_config)
        listeners = vars(kind).get(LISTENERS)
        if listeners is None:
            listeners = []
            kind.collective_rpc = _telling(kind.collective_rpc, listeners)
            setattr(kind, LISTENERS, listeners)
    except (ImportError, AttributeError):
        return False
    listeners.append(weakref.WeakMethod(heard))
    return True


LISTENERS = "_ownerserve_listeners"


def _telling(ask: Callable[..., Any], listeners: list[Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    def collective_rpc(executor: Any, method: Any, *more: Any, **named: Any) -> Any:
        name = method if isinstance(method, str) else ""
        if name not in KEEPS_WEIGHTS:
            # (timeout, args, kwargs), in this order where they have no names
            given = dict(zip(("timeout", "args", "kwargs"), more, strict=False)) | named
            call = WorkerCall(name, given.get("args") or (), given.get("kwargs") or {})
            for listener in listeners:
                if (hears := listener()) is not None:
                    hears(call)
        return ask(executor, method, *more, **named)

    return collective_rpc


def layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield every layer of a KV cache group with its own spec."""
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, inner[name] if inner is not None else spec


def group_spec(group: Any) -> Any:
    """Return the spec that a scheduler has of a KV cache group: of unlike layers, the first
    one's. A pipeline stage has groups of which it keeps no layer."""
    spec = group.kv_cache_spec
    own = next((spec for _, spec in layer_specs(group)), None)
    return own or next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


NO_KV_OF_ITS_OWN = ("ngram", "ngram_gpu", "suffix", "medusa")
"""Speculation whose drafts come from the text, or from heads that keep no KV."""
DRAFT_MODEL, MTP = "draft_model", "mtp"
ABOVE_THE_TARGET = ("eagle", "eagle3", MTP, "dflash", "dspark")
"""Drafters that read the target's hidden states: their layers are numbered on from the target's, or
stand below `mtp`."""


def draft_layers(vllm_config: Any, groups: Sequence[Any]) -> frozenset[str]:
    """Return the layers of KV groups that are a drafter's, not the target's. Raises NotServed
    where they can't be told apart.

    vLLM has one configuration for all layers and marks no layer: names are what tells, on the
    scheduler as on workers. Its own mark is a group's (`is_eagle_group`), and a group may hold
    layers of both.
    """
    speculative = vllm_config.speculative_config
    method = "ngram" if speculative is None else str(speculative.method)
    if method in NO_KV_OF_ITS_OWN:
        return frozenset()
    if int(vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise NotServed("speculative_config", "drafts on one stage of several", "use one stage")
    names = [name for group in groups for name in group.layer_names]
    named = {name for name in names if name.split(".")[0] in (DRAFT_MODEL, MTP)}
    if method == DRAFT_MODEL and named:
        return frozenset(named)
    mend = "report this drafter to OwnerServe"
    if method not in ABOVE_THE_TARGET:
        raise NotServed("speculative_config", f"its {method!r} keeps KV unlike others", mend)
    depth = int(vllm_config.model_config.get_total_num_hidden_layers())
    above = {name for name in names if name not in named and layer_index(name) >= depth}
    numbers, most = len({layer_index(name) for name in above}), _draft_depth(speculative)
    if numbers > most:
        problem = f"{numbers} layers beyond the target's {depth}, the drafter has {most}"
        raise NotServed("speculative_config", problem, mend)
    return frozenset(named | above)


def _draft_depth(speculative: Any) -> int:
    """Return how many layers a drafter has, by its config; that of a multi-token predictor is the
    target's, which tells the predictor's in a field of vLLM's."""
    config = speculative.draft_model_config.hf_config
    field = "n_predict" if speculative.method == MTP else "num_hidden_layers"
    return int(getattr(config, field, 0) or 0)


def packed_by(vllm_config: Any) -> str:
    """Return the origin of the bytes in a page without a canonical payload: vLLM's version, the
    device's, and the settings by which its kernels choose what they write."""
    from vllm.platforms import current_platform

    attention = getattr(vllm_config, "attention_config", None)
    settings = ("backend", "backend_per_kind", "indexer_kv_dtype")
    facts = (
        version(),
        current_platform.device_type,
        current_platform.get_device_capability(),
        *(getattr(attention, name, None) for name in settings),
    )
    return " ".join(map(str, facts))


def layer_index(name: str) -> int:
    """Return the number in a layer's name, like model.layers.3.self_attn.attn. Raises InvalidInput
    where there is none."""
    numbers = [int(word) for word in name.split(".") if word.isdecimal()]
    if not numbers:
        raise InvalidInput("layer", f"{name!r} has no number", "report this model to OwnerServe")
    return numbers[0]


def tensor_rank() -> int:
    """Return this worker's tensor-parallel rank."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def kv_heads(vllm_config: Any) -> int:
    """Return how many heads of keys and values the model has, over all ranks."""
    return int(vllm_config.model_config.get_total_num_kv_heads())


def pipeline_stage() -> int:
    """Return this worker's pipeline stage."""
    from vllm.distributed import get_pp_group

    return int(get_pp_group().rank_in_group)


def stage_layers(vllm_config: Any) -> tuple[int, ...]:
    """Return how many of the model's layers each pipeline stage has."""
    from vllm.distributed.utils import get_pp_indices

    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    ends = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    return tuple(end - start for start, end in ends)


def block_tables(scheduler_output: Any, cache_manager: Any, request_id: str) -> Tables:
    """Return the block ids of a scheduled request, one list a KV group."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    tables: Tables | None = state.get_block_ids(request_id) if state is not None else None
    if tables is None:
        tables = cache_manager.get_block_ids(request_id)
    assert tables is not None
    return tables


def free_queue(pool: Any) -> Any:
    """Return the queue in which the block pool keeps its free blocks."""
    return pool.free_block_queue


def take_the_place_of_the_queue(pool: Any, order: object) -> Sequence[str]:
    """Put `order` in the place of the pool's queue of free blocks. Return what that queue can do or
    tells and `order` does not: where there is anything, the pool keeps its queue."""
    own = {name for name in dir(pool.free_block_queue) if not name.startswith("_")}
    missing = sorted(own - set(dir(order)))
    if not missing:
        pool.free_block_queue = order
    return missing


def prefix_cache_of(pool: Any) -> object:
    """Return what the pool finds cached blocks by; a reset of the cache makes another one."""
    return pool.cached_block_hash_to_block


def is_untouched(pool: Any) -> bool:
    """Return whether no block of the pool is in use, and none is cached."""
    return (
        not len(pool.cached_block_hash_to_block)
        and int(pool.get_num_free_blocks()) == int(pool.num_gpu_blocks) - 1
    )


def cached_block(pool: Any, request: Any, group: int, *, end: int) -> int:
    """Return the id of the block in which the pool has, for a KV cache group, the request's tokens
    that end with token `end`, a whole block's; 0: it has none.

    vLLM hashes pieces of `hash_block_size` tokens, and each hash is over all that lies before: that
    of a longer block is its last piece's.
    """
    piece = end // pool.hash_block_size - 1
    if piece >= len(request.block_hashes):
        return 0
    found = pool.get_cached_block(request.block_hashes[piece], [group])
    return int(found[0].block_id) if found else 0


def evictable_blocks(pool: Any) -> int:
    """Return how many blocks of vLLM's pool nobody uses and hold something, at least.

    vLLM counts them as free, and counts no more than that: those in use are taken to be cached
    too, which all but the last of a request are.
    """
    by_block = getattr(pool, "cached_block_hashes_by_block", None)
    cached = len(pool.cached_block_hash_to_block) if by_block is None else len(by_block)
    free = int(pool.get_num_free_blocks())
    in_use = int(pool.num_gpu_blocks) - 1 - free
    return min(free, max(0, cached - in_use))


def delta_state_is_transposed() -> bool:
    """Return whether a gated delta net's state lies as [heads, value, key] and not [heads, key,
    value]."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    key, value = MAMBA_PROBE
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 1, 1, key, value, 4)
    return tuple(shapes[1][1:]) == (value, key)


def conv_columns_first() -> bool:
    """Return whether a convolution state lies as [columns, channels] and not [channels,
    columns]."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 1, 1, 3, 5, 4)
    return tuple(shapes[0]) == (3, 11)


def is_cpu() -> bool:
    """Return whether vLLM's caches are in host memory."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def external_hash(block_hash: Any) -> Any:
    """Return a block's hash as vLLM's own events tell it."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)


def ready_the_cpu() -> None:
    """Ask the CPU for AMX: a first forward of one token, as after a whole restore, dies without
    it."""
    import torch

    getattr(torch.cpu, "_init_amx", lambda: None)()


def cpu_key_order(spec: Any) -> Sequence[int] | None:
    """Return how the CPU kernels lay a block's keys: for each element its index in [token, dim]
    order.

    Asked of the kernel that writes them, with a block whose values are their own index. None on
    other platforms, where keys and values of a token stand side by side.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, dim, dtype = spec.block_size, spec.head_size, spec.dtype
    isa = _get_attn_isa(dtype, tokens, dim)
    count, base, scale = tokens * dim, 64, 1  # every dtype holds 0..63 exactly
    index = torch.arange(count)
    order = torch.zeros(count, dtype=torch.long)
    slots = torch.arange(tokens, dtype=torch.int64)
    while scale < count:
        digit = ((index // scale) % base).to(dtype).reshape(tokens, 1, dim)
        page = torch.zeros((1, 1, tokens * 2, dim), dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digit, digit.clone(), keys, values, slots, isa)
        if not torch.equal(values.reshape(-1), digit.reshape(-1)):
            raise InvalidInput("kv cache", f"unknown value layout of {isa}", "use another dtype")
        order += keys.reshape(-1).long() * scale
        scale *= base
    return [int(at) for at in order]


REPLAY_HOOKS = ("_get_local_prefix_cache_hit", "_mark_prefix_replay")
"""What a scheduler with a rewind has: vLLM 0.31 and 0.32, made for DeepSeek-V4.1. 0.30 has none."""


class LocalHit(NamedTuple):
    """A `LocalHit` is what vLLM's scheduler found in its own cache, in the order of its hook."""

    blocks: Any
    tokens: int
    junction: int
    diverged: bool


class Rewinding(Protocol):
    """A `Rewinding` decides what a scheduler with a rewind does with each request."""

    def found(self, request: Any, hit: LocalHit) -> LocalHit:
        """Return what the request goes on from, given vLLM's own hit."""
        ...

    def tokens(self) -> int:
        """Return how many tokens the request that was `found` last computes again."""
        ...

    def rewound(self, request: Any, hit: int) -> int:
        """Return the same for a request that is about to run from `hit`."""
        ...


class Rewinds:
    """`Rewinds` stand before vLLM's scheduler class and ask a `Rewinding` instead of its one number
    for all requests. Without one, vLLM does what it does."""

    rewinding: Rewinding | None = None
    _own_replay_tokens = 0

    @property
    def prefix_replay_tokens(self) -> int:
        rewinding = self.rewinding
        return self._own_replay_tokens if rewinding is None else rewinding.tokens()

    @prefix_replay_tokens.setter
    def prefix_replay_tokens(self, tokens: int) -> None:
        self._own_replay_tokens = tokens

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        hit = LocalHit(*super()._get_local_prefix_cache_hit(request))  # type: ignore[misc]
        return hit if self.rewinding is None else self.rewinding.found(request, hit)

    def _mark_prefix_replay(self, request: Any, hit: int, *args: Any, **options: Any) -> int:
        if self.rewinding is not None:
            return self.rewinding.rewound(request, hit)
        tokens: int = super()._mark_prefix_replay(request, hit, *args, **options)  # type: ignore[misc]
        return tokens


def has_replay_hooks() -> bool:
    """Return whether this vLLM's scheduler can rewind a hit, and its KV groups answer apart."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    return (
        all(hasattr(Scheduler, name) for name in REPLAY_HOOKS)
        and hasattr(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group")
        and hasattr(SlidingWindowManager, "pop_blocks_for_free")
    )


def hits_per_group(
    cache_manager: Any, request: Any
) -> tuple[Sequence[Sequence[Any]], Sequence[int]]:
    """Return the cached blocks of each KV group for a request, and how many tokens they span."""
    blocks, tokens = cache_manager.coordinator.find_longest_cache_hit_per_group(
        request.block_hashes, request.num_tokens - 1
    )
    return blocks, tokens


def window_managers(cache_manager: Any) -> list[Any]:
    """Return vLLM's managers of plain sliding-window groups."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    managers = cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if type(manager) is SlidingWindowManager]


def sub_connectors(connector: Any) -> list[Any]:
    """Return a MultiConnector's connectors; of any other one, itself."""
    return list(getattr(connector, "sub_connectors", None) or [connector])


def end_a_step_at(request: Any, tokens: int) -> None:
    """Let vLLM take `tokens` for a place where the request's prompt parts from others', unless it
    knows a deeper one: its cache keeps windows there, and a step ends there that would leave
    recurrent state behind. Said while it looks for what the request goes on from."""
    if tokens > getattr(request, "shared_prefix_boundary", tokens):
        request.shared_prefix_boundary = tokens


def parts_at(request: Any) -> int:
    """Return up to where vLLM has some kind of the request's state; 0: no deeper than all kinds."""
    return int(getattr(request, "shared_prefix_boundary", 0))


def attention_of(vllm_config: Any) -> dict[str, str]:
    """Return the name of each layer's attention backend, on a worker whose model is loaded."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {name: getattr(layer, "attn_backend", None) for name, layer in layers.items()}
    return {name: str(at.get_name()) for name, at in backends.items() if at is not None}


def tell_cached_tokens(request: Any, tokens: int) -> None:
    """Tell the client and the metrics that so many tokens of a prompt were cached, of those that
    the request's first admission counted."""
    stats = getattr(request, "prefill_stats", None)
    if stats is None or request.num_preemptions > 0:
        return
    counted = stats.num_local_cached_tokens + stats.num_external_cached_tokens
    external = max(0, stats.num_external_cached_tokens - max(0, counted - tokens))
    stats.set(
        num_prompt_tokens=request.num_prompt_tokens,
        num_local_cached_tokens=tokens - external,
        num_external_cached_tokens=external,
    )


KERNEL_SEARCH = "_rebind_kernels"


def hide_from_kernel_search(module: str) -> None:
    """Keep a module out of sight while vLLM looks for its kernels in all there are: it asks each
    thing in them for its attributes, and dies of one that answers otherwise. Its CPU build does so,
    from 0.31 on, whenever an engine is built, and there may be a second one in a process."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        return
    search = getattr(dispatcher, KERNEL_SEARCH, None)
    if search is None:
        return

    def without(overrides: Any) -> Any:
        hidden = sys.modules.pop(module, None)
        try:
            return search(overrides)
        finally:
            if hidden is not None:
                sys.modules[module] = hidden

    setattr(dispatcher, KERNEL_SEARCH, without)
