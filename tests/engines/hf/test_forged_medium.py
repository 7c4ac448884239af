"""A worker whose shared medium was tampered with computes, and tells so on /metrics: processes as
an operator runs them, over a shared directory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.store.format.header import decode  # noqa: E402
from ownerserve.store.format.seal import Keys  # noqa: E402
from ownerserve.store.format.verify import draft, record_room  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = text(500, seed=4)
VERDICT = "ownerserve_remote_verdicts_total"


def ownerserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ownerserve.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = ownerserve("store", "new-key", tmp_path / "medium.key")
    assert made.returncode == 0, made.stderr
    return tmp_path / "medium.key"


@pytest.fixture
def started() -> Iterator[list[WorkerProcess]]:
    workers: list[WorkerProcess] = []
    yield workers
    for worker in workers:
        worker.stop()


def blobs(shared: Path) -> list[Path]:
    return sorted((shared / "records").glob("*/*"))


def forge(path: Path) -> None:
    """A whole record of other bytes under the same name, with valid digests and no MAC."""
    header = decode(memoryview(path.read_bytes()))
    meta, size = header.meta, header.payload_bytes
    seal = Keys().for_write(meta.tenant)
    assert seal is not None
    head, total = record_room(meta, size, seal)
    record = memoryview(bytearray(total))
    record[head : head + size] = (b"forged" * size)[:size]
    draft(record, meta, size, seal=seal, now_ms=1)
    path.write_bytes(record[: head + size])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def complete(worker: WorkerProcess, prompt: list[int]) -> tuple[dict[str, Any], str]:
    body = {
        "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1, "session_id": "s",
        "return_token_ids": True,
    }  # fmt: skip
    answer = worker.http.post("/v1/completions", json=body).raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice, answer.headers["x-ownerserve-mode"]


def check_exact(choice: dict[str, Any], prompt: list[int]) -> None:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    for row, token, logprob in zip(
        reference("tiny-qwen3", prompt, tokens), tokens, logprobs, strict=True
    ):
        assert abs(float(row[token]) - logprob) <= TOLERANCE


def kept(worker: WorkerProcess) -> bool:
    """Whether the session's copy is whole: nothing more is under way."""
    count = worker.metric('ownerserve_spill_records_total{outcome="kept"}')
    words = worker.http.get("/ownerserve/inventory", params={"after": 0}).json()["words"]
    return count > 0 and any(word["tier"] == "remote" for word in words)


@pytest.mark.parametrize(("harm", "verdict"), [(forge, "forged"), (damage, "accused")])
def test_what_is_wrong_on_the_medium_is_computed_and_counted(
    tmp_path: Path, key: Path, started: list[WorkerProcess], harm: Any, verdict: str
) -> None:
    shared = tmp_path / "shared"
    flags = ("--remote", str(shared), "--remote-key-file", str(key), "--spill-after", "0.02")
    started.append(WorkerProcess(tmp_path, "one", None, *flags))
    first, _ = complete(started[0], PROMPT)
    until(lambda: kept(started[0]), within_s=300.0, what="the session is on the medium")
    names = ("forged", "reread", "accused", "quarantined", "self_suspected", "key_refused")
    text_of = started[0].http.get("/metrics").text
    assert [f'{VERDICT}{{verdict="{name}"}} 0.0' in text_of for name in names] == [True] * 6
    started.pop().stop()

    for path in blobs(shared):
        harm(path)
    started.append(WorkerProcess(tmp_path, "two", None, *flags))
    prompt = [*PROMPT, *first["token_ids"], *text(40, seed=9)]
    second, mode = complete(started[0], prompt)
    assert mode == "cold_prefill"
    assert started[0].metric(f'{VERDICT}{{verdict="{verdict}"}}') >= 1
    check_exact(second, prompt)


def test_another_key_starts_nothing_and_a_worker_without_a_medium_tells_no_verdicts(
    tmp_path: Path, key: Path, started: list[WorkerProcess]
) -> None:
    shared = tmp_path / "shared"
    flags = ("--remote", str(shared), "--remote-key-file")
    started.append(WorkerProcess(tmp_path, "one", None, *flags, str(key)))
    other = tmp_path / "other.key"
    assert ownerserve("store", "new-key", other).returncode == 0
    refused = ownerserve("worker", "--model", "tiny-qwen3", "--port", "0", *flags, other)
    assert refused.returncode == 2
    assert "remote-key-file" in refused.stderr
    started.append(WorkerProcess(tmp_path, "two", None, "--host-cache", "1MiB"))
    assert VERDICT not in started[1].http.get("/metrics").text
