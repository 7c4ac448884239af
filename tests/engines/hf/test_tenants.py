"""Tenants over a real worker: no prompt of one finds what another's left, nor is told of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.gateway.tenants import read_tenants  # noqa: E402
from tests.gateway.test_tenants import ACME, FILE, GLOBEX, PARTNER, written  # noqa: E402
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    worker = ServedWorker(WorkerOptions(model=MODEL, kv_bytes=32 << 20, max_running=4))
    tenants = read_tenants(written(tmp_path_factory.mktemp("keys"), FILE))
    served = ServedGateway(worker, tenants=tenants)
    yield served
    served.close()
    worker.close()


def cached(gateway: ServedGateway, key: str, prompt: list[int], **headers: str) -> int:
    """Cached tokens as the answer tells them, in its body and in its head alike."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers["authorization"] = f"Bearer {key}"
    answer = gateway.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-ownerserve-cached-tokens"]) == told
    if not told:
        assert answer.headers["x-ownerserve-mode"] == "cold_prefill"
        assert answer.headers["x-ownerserve-expected-cached-tokens"] == "0"
    return int(told)


def test_no_tenant_is_told_of_anothers_prompts(gateway: ServedGateway) -> None:
    draw = random.Random(3)
    for length in (8, 17, 64, 200, 512):
        prompt = [draw.randrange(250) for _ in range(length)]
        assert cached(gateway, ACME, prompt) == 0
        assert cached(gateway, GLOBEX, prompt) == 0
        mine = cached(gateway, ACME, prompt)
        assert mine >= (length - 1) // 16 * 16  # what repeats it would have told
        assert cached(gateway, PARTNER, prompt) == mine  # globex's: they share by their file
        assert cached(gateway, GLOBEX, prompt) == mine


def test_nor_by_a_sessions_name(gateway: ServedGateway) -> None:
    prompt = [7 * n % 241 for n in range(300)]
    named = {"x-session-id": "the same"}
    assert cached(gateway, ACME, prompt, **named) == 0
    assert cached(gateway, GLOBEX, [*prompt, 1, 2, 3], **named) == 0
    assert cached(gateway, ACME, [*prompt, 1, 2, 3], **named) > 250
