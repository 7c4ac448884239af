"""One trace from the client through the gateway into vLLM, whose own spans join by our line."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.gateway.collector import collector
from tests.support.vllm import connectors
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import WarmServers, gateway
from tests.support.waits import until

pytestmark = pytest.mark.vllm

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_vllms_span_of_a_turn_is_below_the_gateways(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path
) -> None:
    with collector() as to:
        flags = ("--otlp-traces-endpoint", f"{to.url}/v1/traces")
        model = rig.checkpoint("qwen3")
        with (
            warm.serve(model, connectors.ours(store), tmp_path / "vllm.log", *flags) as worker,
            gateway([worker.url], tmp_path / "gateway", "--otlp-endpoint", to.url) as (url, _),
        ):
            body = {"model": "tiny", "max_tokens": 4, "prompt": "one, two, three"}
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine-1"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
            answer.raise_for_status()
            assert answer.headers["x-request-id"] == "mine-1"
            assert "mine-1" in answer.json()["id"]
            until(lambda: any(one.name == "llm_request" for one in to.spans), within_s=60.0)
        ours = {one.name: one for one in to.spans if one.service == "ownerserve-gateway"}
    (theirs,) = [one for one in to.spans if one.name == "llm_request"]
    turn, leg = ours["text_completion tiny"], ours["turn at worker"]
    assert turn.parent_id == SPAN and leg.parent_id == turn.span_id
    assert theirs.parent_id == leg.span_id
    assert {turn.trace_id, leg.trace_id, theirs.trace_id} == {TRACE}
    assert theirs.said["gen_ai.usage.prompt_tokens"] == turn.said["gen_ai.usage.input_tokens"]
