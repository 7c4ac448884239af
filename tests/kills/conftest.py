"""What the answers of a fleet whose members are killed are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.kills.processes import Member
from tests.support.kills.wires import WAIT_S


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int]], list[int]]]:
    """What a worker of its own answers, that never saw a session."""
    folder = tmp_path_factory.mktemp("cold")
    given = "worker --model tiny-qwen3 --kv-memory 8MiB --threads 1 --port 0"
    member = Member("cold", folder, given.split())
    member.begin()
    member.await_ready()
    url = (folder / "cold.ready").read_text().strip()

    def answer(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids

    yield answer
    member.terminate()
