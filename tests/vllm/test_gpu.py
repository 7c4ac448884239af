"""What the CPU build can't show: CUDA streams and graphs, TP > 1 on devices, packed V4 blocks.

These need a vLLM environment with CUDA (OWNERSERVE_VLLM_VENV) and are skipped without a device:
`pytest -m "vllm and gpu" tests/vllm/test_gpu.py`. They have not run yet: docs/vllm.md says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.engines.hf.model.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer
from tests.support.children import importing
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import vllm_python
from tests.support.vllm.pages import assert_same_pages, byte_runs
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

B = 32
PLAIN: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": False}
"""CUDA graphs on, as an operator has them."""
TOLERANCE = 0.1
"""bfloat16; as for the bfloat16 family on the CPU. The corruption control has to be beyond it."""


V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 0,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "expert_dtype": "fp4",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""As published for V4-Flash where its kernels care; few layers, few experts, a small vocabulary."""


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


def test_quantised_pages_are_restored_as_they_lie(rig: Rig, store: Path) -> None:
    """fp8 with a scale for each head of each token inside the page: no canonical payload."""
    engine = {**PLAIN, "kv_cache_dtype": "fp8_per_token_head"}
    first, second, other = byte_runs(rig, store, "qwen3", B, **engine)
    assert_same_pages(first, second)
    assert all(first[name] != other[name] for name in first)


def play_packed(folder: Path, *models: str) -> dict[str, Any]:
    """The scenarios of packed blocks and of streams, without an engine."""
    run = subprocess.run(
        [str(vllm_python()), "-m", "tests.support.vllm_parts.packed_child", str(folder), *models],
        env=importing(PACKED_DEVICE="cuda"),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("model", ["v4", "v4 plain rows", "v3.2"])
def test_packed_blocks_and_streams_on_a_device(tmp_path: Path, model: str) -> None:
    """vLLM's own packing of its own specs, in the device's memory, through our stream and pinned
    host memory; and work that the engine has queued comes before our copies."""
    found = play_packed(tmp_path, model)[model]
    assert found["same_for_the_scheduler"] and found["device"] == "cuda"


@pytest.fixture
def v4_engine(tmp_path: Path) -> dict[str, Any]:
    """A DeepSeek-V4 of four layers in the real one's dimensions, its weights made up by vLLM; or
    the checkpoint at OWNERSERVE_V4_MODEL."""
    common = {
        "dtype": "auto",
        "enforce_eager": False,
        "block_size": 256,
        "kv_cache_dtype": "fp8",
        "num_gpu_blocks_override": 4096,  # a compressor keeps four tokens in a block
    }
    if model := os.environ.get("OWNERSERVE_V4_MODEL"):
        return {**common, "model": model}
    byte_tokenizer().save_pretrained(tmp_path / "v4")
    (tmp_path / "v4" / "config.json").write_text(json.dumps(V4))
    made_up = {"load_format": "dummy", "tokenizer_mode": "hf", "model": str(tmp_path / "v4")}
    return {**common, **made_up}


def test_deepseek_v4s_blocks_come_back_byte_by_byte(
    rig: Rig, v4_engine: dict[str, Any], store: Path
) -> None:
    """Made-up weights say nothing by their answers; the bytes of every layer's pages do."""
    first, second, other = byte_runs(rig, store, "deepseek4", 256, **v4_engine)
    assert any("compressor" in name for name in first)
    assert any("swa_cache" in name for name in first)
    assert_same_pages(first, second)
    assert any(first[name][-1] != other[name][-1] for name in first)


def test_deepseek_v4_on_two_ranks(
    rig: Rig, devices: int, v4_engine: dict[str, Any], store: Path
) -> None:
    """Its caches are the same on every rank; each keeps its own copy, and a load needs both."""
    if devices < 2:
        pytest.skip("tensor parallelism over two ranks needs two CUDA devices")
    engine = {**v4_engine, "tensor_parallel_size": 2}
    prompt = tiny.prompt(1028, seed=105)
    worker = rig.worker("deepseek4", connectors.ours(store), **engine)
    worker.generate(prompt, max_tokens=1)
    settle(worker)
    worker.shutdown()
    after = rig.worker("deepseek4", connectors.ours(store), **engine)
    assert after.generate(prompt, max_tokens=1).cached == 1024


# ---- rates: what an operator reads before he starts. They print what they measured (-s).


def test_copies_come_near_the_bus() -> None:
    """A record out of scattered blocks and into them, beside a plain copy of as many bytes between
    the same memories; the device holds its staging memory and nothing more."""
    run = subprocess.run(
        [str(vllm_python()), "-m", "tests.support.vllm_parts.rates_child"],
        env=importing(PACKED_DEVICE="cuda"),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    print(found)
    assert found["device"] == "cuda" and found["same"]
    assert found["grown_bytes"] == 0
    assert found["save_gb_s"] >= 0.6 * found["plain_out_gb_s"]
    assert found["load_gb_s"] >= 0.6 * found["plain_in_gb_s"]


LONG = 12_000
ROUNDS = 5
ROOM: dict[str, Any] = {
    "max_model_len": LONG + 255,
    "num_gpu_blocks_override": 2 * (LONG // B) + 40,
    "max_num_batched_tokens": 2048,
}


def ttft_s(worker: Any, prompt: list[int]) -> float:
    answer = worker.generate(prompt, max_tokens=1, top=0)
    return float(answer.ttft_s)


def test_a_resume_beside_a_hit_on_the_device(rig: Rig, store: Path) -> None:
    """TTFT of a session whose blocks are on the device, that comes back from host memory, and that
    is computed."""
    settings = connectors.ours(store, restores="always", host_cache_bytes=2 << 30)
    worker = rig.worker("qwen3", settings, **PLAIN, **ROOM)
    ttft_s(worker, tiny.prompt(64, seed=1))
    computed, resident, resumed = [], [], []
    for number in range(ROUNDS):
        prompt = tiny.prompt(LONG, seed=120 + number)
        computed.append(ttft_s(worker, prompt))
        settle(worker)
        resident.append(ttft_s(worker, prompt))
        worker.ask("reset")
        again = worker.generate(prompt, max_tokens=1, top=0)
        assert again.cached >= (LONG - 1) // B * B
        resumed.append(again.ttft_s)
        settle(worker)
        worker.ask("reset")
    found = {
        "computed_ms": statistics.median(computed) * 1e3,
        "resident_ms": statistics.median(resident) * 1e3,
        "resumed_ms": statistics.median(resumed) * 1e3,
    }
    print(found)
    assert found["resident_ms"] <= found["resumed_ms"] < found["computed_ms"]


def test_saves_hardly_slow_a_prefill(rig: Rig, store: Path) -> None:
    """The same prompts computed with a connector that saves all of them, and without one."""
    medians = {}
    for name, settings in (("saving", connectors.ours(store)), ("alone", {})):
        worker = rig.worker("qwen3", settings, **PLAIN, **ROOM)
        ttft_s(worker, tiny.prompt(64, seed=1))
        took = [ttft_s(worker, tiny.prompt(LONG, seed=140 + n)) for n in range(ROUNDS)]
        medians[name] = statistics.median(took) * 1e3
        worker.kill()
    print(medians)
    assert medians["saving"] <= 1.1 * medians["alone"]
