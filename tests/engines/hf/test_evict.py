"""`ownerserve worker --evict` names what goes first: two real workers, asked alike, keep different
state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hf.worker_process import WorkerProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.engine


def cached_on_return(worker: WorkerProcess) -> tuple[str, int, int]:
    """Ask a session, then two strangers who leave no room for it and each other. Returns the order
    that the worker names, how many tokens the session's next turn found, and how many it had."""
    device = worker.http.get("/ownerserve/status").json()["device"]
    pool = max(device["slots"].values()) * device["block_tokens"]
    part = pool * 2 // 5

    def ask(prompt: list[int], session: str | None) -> int:
        told = {} if session is None else {"x-session-id": session}
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = worker.http.post("/v1/completions", json=body, headers=told)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-ownerserve-cached-tokens"])

    first = [1 + number % 200 for number in range(part)]
    ask(first, "mine")
    for stranger in (7, 9):
        ask([stranger, *first[:-1]], None)
    return device["eviction"], ask([*first, 3], "mine"), part


@pytest.mark.parametrize(("order", "is_kept"), [("cost", True), ("lru", False)])
def test_the_order_named_decides_who_finds_its_state(
    tmp_path: Path, order: str, is_kept: bool
) -> None:
    """`cost` lets go whom nobody expects back, `lru` whoever was here first: the session."""
    worker = WorkerProcess(
        tmp_path, order, None, "--kv-memory", "1MiB", "--max-running", "2", "--evict", order
    )
    try:
        named, cached, had = cached_on_return(worker)
    finally:
        worker.stop()
    assert named == order
    assert (cached > had * 9 // 10) == is_kept, f"{cached} of {had} tokens"
    assert is_kept or cached < had // 2
