"""What the CPU build can't show: CUDA streams and graphs, TP > 1 on devices, packed pages.

These need a vLLM environment with CUDA (OWNERSERVE_VLLM_VENV) and are skipped without a device:
`pytest -m "vllm and gpu" tests/vllm/test_gpu.py`. They have not run yet: docs/vllm.md says so.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import connectors
import oracle
import pytest
import tiny
from fleet import WorkerFailed, vllm_python
from rig import Rig, next_turn, settle

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

B = 32
PLAIN: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": False}
"""CUDA graphs on, as an operator has them."""
TOLERANCE = 0.1
"""bfloat16; as for the bfloat16 family on the CPU. The corruption control has to be beyond it."""


@pytest.fixture(scope="module")
def devices() -> Iterator[int]:
    """CUDA devices that the vLLM under test sees."""
    code = "import torch; print(torch.cuda.device_count())"
    run = subprocess.run([str(vllm_python()), "-c", code], capture_output=True, text=True)
    count = int(run.stdout.strip() or 0) if run.returncode == 0 else 0
    if not count:
        pytest.skip("the vLLM under test sees no CUDA device")
    yield count


@pytest.fixture(autouse=True)
def _needs_a_device(devices: int) -> None:
    """Every test here."""


def cold(rig: Rig, family: str, prompt: list[int]) -> Any:
    worker = rig.worker(family, {"enable_prefix_caching": False}, **PLAIN)
    answer = worker.generate(prompt)
    worker.kill()
    return answer


def assert_same(one: Any, other: Any) -> None:
    found = oracle.judge(one, other)
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gptoss"])
def test_a_restart_restores_with_cuda_graphs(rig: Rig, family: str, store: Path) -> None:
    prompt = tiny.prompt(500, seed=101)
    worker = rig.worker(family, connectors.ours(store), **PLAIN)
    answer = worker.generate(prompt, session="s", max_tokens=40)
    settle(worker)
    worker.shutdown()
    after = rig.worker(family, connectors.ours(store), **PLAIN)
    restored = after.generate(prompt)
    assert restored.cached == 499 // B * B
    assert_same(cold(rig, family, prompt), restored)
    following = next_turn(prompt, answer, seed=1)
    again = after.generate(following, session="s")
    assert again.cached >= 540 // B * B
    assert_same(cold(rig, family, following), again)


def test_the_oracle_sees_a_spoilt_restore(rig: Rig, store: Path) -> None:
    """The control of all tests here."""
    prompt = tiny.prompt(500, seed=102)
    worker = rig.worker("qwen3", connectors.ours(store), **PLAIN)
    worker.generate(prompt)
    settle(worker)
    worker.ask("reset")
    worker.hook("corrupt_restored")
    spoilt = worker.generate(prompt)
    assert spoilt.cached > 0
    assert oracle.judge(cold(rig, "qwen3", prompt), spoilt).worst > TOLERANCE


def test_copies_wait_for_the_engines_stream_and_it_for_them(rig: Rig, store: Path) -> None:
    """Saves read blocks whose forward is only queued, loads write into blocks whose zeroing is:
    many of both at once, beside requests that decode. Without the events between the streams the
    stored KV is what stood in the blocks before."""
    prompts = [tiny.prompt(400 + 32 * n, seed=110 + n) for n in range(8)]
    settings = connectors.ours(store, readers=4)
    worker = rig.worker("qwen3", settings, num_gpu_blocks_override=400, **PLAIN)
    first = worker.wait([worker.submit(prompt, max_tokens=48) for prompt in prompts])
    settle(worker)
    for _ in range(3):
        worker.ask("reset")
        again = worker.wait([worker.submit(prompt, max_tokens=48) for prompt in prompts])
        for prompt, one, other in zip(prompts, first, again, strict=True):
            assert other.cached >= (len(prompt) - 1) // B * B
            assert_same(one, other)
        settle(worker)


def test_what_a_device_stored_is_the_canonical_payload(rig: Rig, store: Path) -> None:
    """Two attention backends lay pages out differently; their records are one artifact."""
    prompt = tiny.prompt(500, seed=103)
    one = rig.worker("qwen3", connectors.ours(store), attention_backend="FLASH_ATTN", **PLAIN)
    one.generate(prompt)
    settle(one)
    one.shutdown()
    other = rig.worker("qwen3", connectors.ours(store), attention_backend="FLASHINFER", **PLAIN)
    restored = other.generate(prompt)
    assert restored.cached == 499 // B * B
    assert_same(cold(rig, "qwen3", prompt), restored)


def test_two_ranks_restore_their_shards_or_nothing(rig: Rig, devices: int, store: Path) -> None:
    """TP 2: each rank keeps its heads. When one rank's shard is lost the whole load is a miss."""
    if devices < 2:
        pytest.skip("tensor parallelism over two ranks needs two CUDA devices")
    engine = {**PLAIN, "tensor_parallel_size": 2}
    prompt = tiny.prompt(500, seed=104)
    worker = rig.worker("qwen3", connectors.ours(store), **engine)
    truth = worker.generate(prompt)
    settle(worker)
    worker.shutdown()
    shards = sorted(path.name for path in store.glob("shard-*"))
    assert shards == ["shard-0-of-2", "shard-1-of-2"]
    after = rig.worker("qwen3", connectors.ours(store), **engine)
    restored = after.generate(prompt)
    assert restored.cached == 499 // B * B
    assert_same(truth, restored)
    settle(after)
    after.shutdown()
    for segment in (store / "shard-1-of-2" / "segments").iterdir():
        segment.write_bytes(b"")
    last = rig.worker("qwen3", connectors.ours(store), **engine)
    assert_same(truth, last.generate(prompt))
    settle(last)


def test_a_packed_layout_is_refused_by_name_at_start(rig: Rig, store: Path) -> None:
    """fp8 with scales inside the page, as DeepSeek-V4 packs its latents: no canonical payload."""
    with pytest.raises(WorkerFailed, match="no canonical payload"):
        rig.worker("qwen3", connectors.ours(store), kv_cache_dtype="fp8_per_token_head", **PLAIN)


def test_deepseek_v4_is_refused_by_name_at_start(rig: Rig, store: Path) -> None:
    """No tiny V4 that vLLM takes can be drawn (docs/evidence/w4-vllm.md): a real one is needed."""
    model = os.environ.get("OWNERSERVE_V4_MODEL")
    if not model:
        pytest.skip("set OWNERSERVE_V4_MODEL to a DeepSeek-V4 checkpoint")
    with pytest.raises(WorkerFailed, match="no canonical payload"):
        rig.worker("qwen3", connectors.ours(store), model=model, dtype="auto")
