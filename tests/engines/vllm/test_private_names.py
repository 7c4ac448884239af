"""What of vLLM is no interface for others is used in compat.py alone, and each name is there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = ROOT / "src" / "ownerserve" / "engines" / "vllm"
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"
INTERFACES = (
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.kv_offload.",
)
"""What connectors, event publishers and offloading tiers outside of vLLM are written against, and
the classes of which `--scheduler-cls` takes a subclass."""
NAMES = {
    "connector factory": "vllm.distributed.kv_transfer.kv_connector.factory KVConnectorFactory",
    "its registering": (
        "vllm.distributed.kv_transfer.kv_connector.factory KVConnectorFactory.register_connector"
    ),
    "which executor": "vllm.v1.executor Executor.get_class",
    "calls to workers": "vllm.v1.executor Executor.collective_rpc",
    "a worker's rank": "vllm.distributed get_tensor_model_parallel_rank",
    "hashes in events": "vllm.v1.core.kv_cache_utils maybe_convert_block_hash",
    "block tables": "vllm.v1.core.kv_cache_manager KVCacheManager.get_block_ids",
    "free blocks": "vllm.v1.core.block_pool BlockPool.get_num_free_blocks",
    "eviction": "vllm.v1.core.block_pool BlockPool.evict_blocks",
    "cached blocks": "vllm.v1.core.block_pool BlockPool.get_cached_block",
    "how free blocks are taken": ("vllm.v1.core.kv_cache_utils FreeKVCacheBlockQueue.popleft_n"),
    "recurrent shapes": (
        "vllm.model_executor.layers.mamba.mamba_utils"
        " MambaStateShapeCalculator.gated_delta_net_state_shape"
    ),
    "the depth of a target": "vllm.config ModelConfig.get_total_num_hidden_layers",
    "platform": "vllm.platforms current_platform",
    "CPU kernels": "vllm._custom_ops cpu_attn_reshape_and_cache",
    "a worker's stage": "vllm.distributed get_pp_group",
    "layers of a stage": "vllm.distributed.utils get_pp_indices",
    "all layers": "vllm.config.model ModelConfig.get_total_num_hidden_layers",
    "which CPU kernels": "vllm.v1.attention.backends.cpu_attn _get_attn_isa",
}
"""By what we need it for: a module, and a name in it. 0.30 to 0.32 have them all."""

ASKED = """
import importlib, json, sys
import vllm
missing = []
for place in json.load(sys.stdin):
    module, name = place.split()
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        missing.append(f"{place}: {error}")
print(json.dumps({"version": vllm.__version__, "missing": missing}))
"""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Each module of vLLM that a file imports from, and private names, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("vllm"):
                yield node.lineno, module
                yield from (
                    (node.lineno, f"{module} {each.name}")
                    for each in names
                    if each.name.startswith("_")
                )


@pytest.mark.parametrize(
    "path", sorted(set(OURS.rglob("*.py")) - {OURS / "compat.py"}), ids=lambda path: path.name
)
def test_only_compat_uses_what_is_no_interface(path: Path) -> None:
    """Private attributes of other objects are held by ruff (SLF001), in all of our code."""
    others = [
        f"{path.name}:{line}: {name}"
        for line, name in imported(path)
        if name.split(".")[0] == "vllm" and (not name.startswith(INTERFACES) or " " in name)
    ]
    assert others == []


def test_the_walk_sees_what_it_is_to_see() -> None:
    found = {name for _, name in imported(OURS / "compat.py")}
    assert "vllm.v1.attention.backends.cpu_attn _get_attn_isa" in found


@pytest.mark.vllm
def test_this_version_has_every_name() -> None:
    """Says which version moved what: run it with OWNERSERVE_VLLM_VENV at a new one first."""
    if not PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    run = subprocess.run(
        [PYTHON, "-c", ASKED],
        input=json.dumps(list(NAMES.values())),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["missing"] == [], f"vLLM {said['version']} moved these"
