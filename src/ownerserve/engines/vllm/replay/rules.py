"""Rules say how many tokens a replay computes for a model, and why an engine has none. Pure: vLLM's
configuration is read by attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ownerserve.engines.vllm.replay.replays import ReplayLengths
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.geometry import exact_replay_tokens
from ownerserve.kv.registry import build_spec

FULL, SLIDING = "FullAttentionSpec", "SlidingWindowSpec"
SCHEDULERS = ("ReplayScheduler", "AsyncReplayScheduler")

READS_THE_CACHE = frozenset({"CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})
"""Attention of vLLM's that reads even a step's own keys and values from the cache: a row that is
not written is read as it stands there. CPU_ATTN is tested, the others are read."""


def is_asked(vllm_config: Any) -> bool:
    """Return whether the operator named one of our schedulers."""
    named = vllm_config.scheduler_config.scheduler_cls
    name = named if isinstance(named, str) else getattr(named, "__qualname__", "")
    return str(name).rpartition(".")[2] in SCHEDULERS


def why_off(vllm_config: Any, kv_cache_config: Any, *, has_hooks: bool) -> str | None:
    """Return why this engine can't replay, whatever its model's windows are; None when it can."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    config = vllm_config.model_config.hf_text_config
    reasons = {
        "this vLLM has other hooks, or none: 0.31 and 0.32 have them": not has_hooks,
        "prefix caching is off": not cache.enable_prefix_caching,
        "decode context parallelism shares blocks between ranks": _more(parallel, "decode"),
        "prefill context parallelism shares blocks between ranks": _more(parallel, "prefill"),
        "micro-batches share a step's slots": _has_micro_batches(parallel),
        "speculation drafts over the windows": (
            speculative is not None and speculative.method != "ngram"
        ),
        "MLA computes a prompt from fresh keys": bool(
            getattr(vllm_config.model_config, "use_mla", False)
        ),
        "layers share their KV": bool(getattr(config, "num_kv_shared_layers", 0)),
        f"its KV groups are {', '.join(sorted(set(kinds)))}": bool({*kinds} - {FULL, SLIDING}),
        "it has no window": SLIDING not in kinds,
        "it has windows alone": FULL not in kinds,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def replay_lengths(
    config: Mapping[str, Any], groups: Sequence[Any], *, stages: int
) -> ReplayLengths | str:
    """Return what a replay computes: the sum over all window layers of (window - 1), and what makes
    whole blocks of it. A string says why that is not known.

    `groups` are the KV groups of the scheduler, which under pipeline parallelism has the layers of
    its first stage alone: the model's spec counts all of them.
    """
    windows = [group for group in groups if type(group.kv_cache_spec).__name__ == SLIDING]
    seen = sum(
        (int(group.kv_cache_spec.sliding_window) - 1) * len(group.layer_names) for group in windows
    )
    try:
        depth = exact_replay_tokens(build_spec(config))
    except OwnerServeError as error:
        if stages > 1:
            return f"the windows of all pipeline stages can't be counted: {error}"
        depth = seen
    if depth is None:
        return "the model keeps recurrent state"
    depth = max(depth, seen)
    slack = max((_slack(group.kv_cache_spec) for group in windows), default=0)
    return ReplayLengths(depth, depth + slack)


def _slack(spec: Any) -> int:
    """Return how many rows the last blocks of a window hold beyond it."""
    return -(int(spec.sliding_window) - 1) % int(spec.block_size)


def _more(parallel: Any, kind: str) -> bool:
    return int(getattr(parallel, f"{kind}_context_parallel_size", 1) or 1) > 1


def _has_micro_batches(parallel: Any) -> bool:
    return any(bool(getattr(parallel, name, False)) for name in ("enable_dbo", "use_ubatching"))
