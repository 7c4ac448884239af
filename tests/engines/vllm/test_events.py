"""What the connector says of its store, read as a router reads vLLM's event stream."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"

# In vLLM's environment: a request of 70 tokens in blocks of 16, stored in two records of which one
# is refused; then found to be gone. Encoded and decoded as vLLM's publisher and a subscriber do.
SCRIPT = """
import json
from types import SimpleNamespace
import msgspec
from vllm.distributed.kv_events import KVEventBatch
from ownerserve.engines.vllm.scheduler_side.events import ResidencyEvents, span_of

request = SimpleNamespace(
    block_hashes=[bytes([n]) * 32 for n in range(4)],
    all_token_ids=list(range(70)),
    session_id="s",
)
residency = ResidencyEvents()

def told():
    batch = KVEventBatch(ts=0.0, events=residency.take())
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    return [
        [type(event).__name__, msgspec.to_builtins(event.block_hashes), event.medium,
         event.ownership, getattr(event, "token_ids", None), getattr(event, "session_id", None),
         msgspec.to_builtins(getattr(event, "parent_block_hash", None))]
        for event in read.events
    ]

report = {"partial block": span_of(request, 64, 70, hash_block_tokens=16) is None}
residency.ordered(1, span_of(request, 16, 60, hash_block_tokens=16))
residency.ordered(2, span_of(request, 0, 16, hash_block_tokens=16))
report["before"] = told()
residency.kept(1)
residency.not_kept(2)
residency.kept(7)
report["kept"] = told()
residency.lost(span_of(request, 0, 70, hash_block_tokens=16))
report["lost"] = told()
residency.lost(span_of(request, 0, 70, hash_block_tokens=16))
report["again"] = told()
print(json.dumps(report))
"""


def test_a_record_is_told_once_when_ready_and_once_when_gone() -> None:
    if not PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    run = subprocess.run(
        [PYTHON, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["partial block"] is True
    assert report["before"] == []
    [stored] = report["kept"]
    kind, hashes, medium, ownership, tokens, session, parent = stored
    assert (kind, medium, ownership, session) == ("BlockStored", "STORAGE", "ownerserve", "s")
    assert len(hashes) == 2
    assert tokens == list(range(16, 48))
    assert parent is not None
    assert parent not in hashes
    [removed] = report["lost"]
    assert removed[:4] == ["BlockRemoved", hashes, "STORAGE", "ownerserve"]
    assert report["again"] == []
