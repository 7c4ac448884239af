"""Data parallelism: each engine core has a store, a name and sessions of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.vllm import connectors, tiny
from tests.support.vllm.installed import distribution
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import serve
from tests.support.waits import until

pytestmark = pytest.mark.vllm

FAMILIES = ["qwen3"] + (["gptoss"] if os.environ.get("OWNERSERVE_LONG") else [])
"""Dense, whose engine cores know nothing of each other; long: experts, which step together."""
TWO = ("--data-parallel-size", "2")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_engine_cores_restore_their_own(
    rig: Rig, store: Path, tmp_path: Path, family: str
) -> None:
    model, installed = rig.checkpoint(family), distribution(tmp_path / "site")
    connector = connectors.ours(store, worker_id="w")
    prompts = [tiny.prompt(400, seed=161 + rank) for rank in range(2)]
    with serve(model, connector, tmp_path / "1.log", *TWO, installed=installed) as server:
        said = [turn(server.url, prompt, rank) for rank, prompt in enumerate(prompts)]
        units = [unit(server.url, rank) for rank in range(2)]
        until(lambda: all((home(store, rank) / "segments").exists() for rank in range(2)))
        refused = httpx.get(f"{server.url}/ownerserve/status?rank=2", timeout=30)
    assert [(one["worker"], one["rank"]) for one in units] == [("w", 0), ("w", 1)]
    assert refused.status_code == 400
    with serve(model, connector, tmp_path / "2.log", *TWO, installed=installed) as server:
        again = [turn(server.url, prompt, rank) for rank, prompt in enumerate(prompts)]
    assert [cached for _, cached in said] == [0, 0]
    assert [cached for _, cached in again] == [384, 384]
    assert [text for text, _ in again] == [text for text, _ in said]


def home(store: Path, rank: int) -> Path:
    return store / f"dp-{rank}" if rank else store


def unit(url: str, rank: int) -> dict[str, Any]:
    answer = httpx.get(f"{url}/ownerserve/status?rank={rank}", timeout=30)
    found: dict[str, Any] = answer.json()["unit"]
    return found


def turn(url: str, prompt: list[int], rank: int) -> tuple[list[int], int]:
    """A turn on a rank: the answer's tokens, and how many of the prompt were cached."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    headers = {"x-data-parallel-rank": str(rank), "x-session-id": f"s{rank}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    read = answer.json()
    details = read["usage"]["prompt_tokens_details"] or {}
    return read["choices"][0]["token_ids"], details.get("cached_tokens") or 0
