"""Stock `vllm serve` twice, with a connector of vLLM's own: the gateway has the one compute prompts
and the other answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.vllm import connectors, tiny
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import WarmServers, gateway

pytestmark = pytest.mark.vllm

PROMPT = 1000
LOADED = 992
"""All of its blocks but the last."""


def test_one_computes_the_prompt_and_the_other_loads_it(
    rig: Rig, warm: WarmServers, tmp_path: Path
) -> None:
    model, connector = rig.checkpoint("qwen3"), connectors.example(tmp_path / "shared")
    body = {
        "model": "tiny", "prompt": tiny.prompt(PROMPT, seed=1), "max_tokens": 8, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    with (
        warm.serve(model, connector, tmp_path / "p.log") as prefill,
        warm.serve(model, connector, tmp_path / "d.log") as decode,
        gateway(
            [f"prefill+{prefill.url}", f"decode+{decode.url}"], tmp_path / "g",
            "--policy", "static_pd",
        ) as (url, admin),
    ):  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.headers["x-ownerserve-action"] == "remote_prefill"
        metrics = httpx.get(f"{admin}/metrics", timeout=30).text
        assert 'ownerserve_gateway_legs_total{leg="prefill",outcome="done"} 1.0' in metrics
        told = answer.json()
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == LOADED
        alone = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=120).json()
        assert told["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
