"""Window replay is a replay as an engine with paged state can do it: full attention's KV stands in
blocks that others share, and the windows before its end are computed anew. This module says which
models have one. vLLM's scheduler class and the simulator's `vllm-replay` both ask here.
"""

from __future__ import annotations

from ownerserve.kv.geometry import exact_replay_tokens
from ownerserve.kv.specs import ModelSpec, Role

PAGED = frozenset({"full_attention", "sliding_attention"})
"""Layers, as configurations call them, whose windows vLLM pages apart from full attention."""


def why_no_window_replay(spec: ModelSpec, *, block_tokens: int, step_tokens: int) -> str | None:
    """Return why a model's windows can't be replayed so, in steps of at most `step_tokens`; None
    when they can."""
    roles = {state.role for state in spec.states}
    others = sorted(role.value for role in roles - {Role.DENSE, Role.SWA})
    if others:
        return f"it keeps {', '.join(others)}"
    if any(layer.kv_source is not None for layer in spec.layers):
        return "layers share their KV"
    kinds = sorted({layer.type for layer in spec.layers} - PAGED)
    if kinds:
        return f"its layers are of {', '.join(kinds)}"
    if Role.SWA not in roles:
        return "it has no window"
    if Role.DENSE not in roles:
        return "it has windows alone"
    return why_too_long(
        exact_replay_tokens(spec) or 0, block_tokens=block_tokens, step_tokens=step_tokens
    )


def why_too_long(tokens: int, *, block_tokens: int, step_tokens: int) -> str | None:
    """Return why a replay of so many tokens does not fit into a step, whose blocks it takes at
    once; None: it does."""
    if tokens + block_tokens > step_tokens:
        return f"a replay of {tokens} tokens is longer than a step of {step_tokens}"
    return None
