"""KV bytes a request and prefill's share of compute, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.trace.cost import model_cost, read_config
from ownerserve.trace.flops import active_parameters, flops_of
from ownerserve.trace.model import Trace, TraceRequest, TraceSession

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


def one_request(input_tokens: int, output_tokens: int) -> Trace:
    session = TraceSession("s", (TraceRequest(0, input_tokens, output_tokens),))
    return Trace("t", "test", 0, "none", "unknown", "unknown", (session,))


def test_dense_parameters_by_hand() -> None:
    # a layer: q 8x8, k and v 8x4 each, o 8x8, three 8x16; output head 8x100
    assert active_parameters(DENSE) == 2 * (64 + 2 * 32 + 64 + 3 * 128) + 800


def test_dense_operations_by_hand() -> None:
    flops = flops_of(DENSE, build_spec(DENSE), 1000)
    start, end = np.array([10.0]), np.array([12.0])
    # 2 tokens x 2000, and for positions 10..12 two layers of 2 heads x (4 + 4) x 2 an entry
    entries = (12**2 - 10**2) / 2
    assert flops.between(start, end)[0] == 2 * 2000 + entries * 2 * 2 * 2 * 8


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_example_model_has_a_cost(name: str) -> None:
    config = read_config(CONFIGS / f"{name}.json")
    cost = model_cost(one_request(100_000, 500), config, model=name, parameters=3e9)
    assert cost.prefill_share_of_compute is not None
    assert 0.9 < cost.prefill_share_of_compute < 1
    geometry = Geometry.of(build_spec(config))
    expected = geometry.range_bytes(100_500) + geometry.fixed_bytes_per_sequence
    assert cost.kv_bytes_per_request.p99 == expected


def test_capped_attention_stops_growing() -> None:
    """V4's CSA scores every compressed entry but attends to index_topk of them at most."""
    config = read_config(CONFIGS / "deepseek-v4-flash.json")
    flops = flops_of(config, build_spec(config), 13e9)
    capped = [term for term in flops.terms if term.stride == 4 and term.cap == 512]
    assert capped
    windows = [term for term in flops.terms if term.cap == 128]
    assert windows
    dense = flops_of(DENSE, build_spec(DENSE), 13e9)
    far, further = np.array([1e6]), np.array([1e6 + 1])
    assert sum(t.ops * t.cap for t in capped) < flops.between(far, further)[0]
    assert dense.terms[0].cap == np.inf


def test_an_untold_parameter_count_leaves_the_share_open() -> None:
    config = read_config(CONFIGS / "deepseek-v4-pro.json")
    cost = model_cost(one_request(1000, 10), config, model="v4")
    assert cost.prefill_share_of_compute is None
    assert "--active-params" in cost.note
