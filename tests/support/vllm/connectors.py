"""The connectors a worker can be built with, by name: engine arguments for `Boot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MIB = 1 << 20


def none() -> dict[str, Any]:
    """vLLM alone: its own prefix cache, LRU."""
    return {}


def ours(store: Path, *, host_cache_bytes: int = 64 * MIB, **extra: Any) -> dict[str, Any]:
    """OwnerServe's connector over a store folder; `extra` as in docs/vllm.md.

    Restores whatever is stored: by cost, a tiny model's prefill is often cheaper. And however long
    it takes: on a crowded machine that is no fault.
    """
    settings = {
        "store": str(store),
        "host_cache_bytes": host_cache_bytes,
        "restores": "always",
        "restore_deadline_s": 60.0,
        **extra,
    }
    return _transfer(
        {
            "kv_connector": "OwnerServeConnector",
            "kv_connector_module_path": "ownerserve.engines.vllm.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
    )


def noop() -> dict[str, Any]:
    """A connector that does nothing but exist (benchmarks/vllm)."""
    return _transfer(
        {"kv_connector": "NoopConnector", "kv_connector_module_path": "noop_connector"}
    )


def offloading(
    folder: Path, *, host_bytes: int = 64 * MIB, chunk_tokens: int = 0
) -> dict[str, Any]:
    """vLLM's OffloadingConnector: host memory, then its `fs` tier."""
    settings: dict[str, Any] = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_offload_spec",
        "cpu_bytes_to_use": host_bytes,
        "offload_prompt_only": False,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    if chunk_tokens:
        settings["block_size"] = chunk_tokens
    return _transfer({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": settings})


def sending() -> dict[str, Any]:
    """A connector that holds what is finished until it was sent, and never loads (sender.py)."""
    return _transfer(
        {
            "kv_connector": "Sender",
            "kv_connector_module_path": "tests.support.vllm.sender",
            "kv_load_failure_policy": "recompute",
        }
    )


def example(folder: Path) -> dict[str, Any]:
    """vLLM's example of a connector: who computes a prompt writes it to a folder that all share,
    and who is asked for it reads it there."""
    settings = {"shared_storage_path": str(folder)}
    return _transfer({"kv_connector": "ExampleConnector", "kv_connector_extra_config": settings})


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Connectors in this order under vLLM's MultiConnector."""
    children = [connector["kv_transfer_config"] for connector in connectors]
    return _transfer(
        {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    )


def lmcache(port: int) -> dict[str, Any]:
    """LMCache's connector to its cache server on this host."""
    settings = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.save_decode_cache": True,
    }
    return _transfer({"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": settings})


def _transfer(config: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_role": "kv_both", **config}}
