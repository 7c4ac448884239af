"""What a worker tells others while it serves: its load, what its store holds, and whose it is."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ownerserve.kv.prefix import tenant_salt
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Admit, Probe, Reject, Seed, Status, StatusIs
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import Want
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.asking import ask
from tests.support.vllm.rig import Rig, settle
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
RECURRENT_NOISE = 0.02
"""Between a decoded state and a prefilled one in bfloat16; one of another position: over 0.6."""


def test_a_tenant_restores_its_own_state_and_nobody_elses(rig: Rig, store: Path) -> None:
    """A branch of one tenant's prompt must not be found through the other's longer record."""
    prompt = tiny.prompt(400, seed=61)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(prompt, salt="alice")
    worker.generate(prompt[:200], salt="bob")
    settle(worker)
    worker.shutdown()
    after = rig.worker("qwen3", connectors.ours(store))
    own = after.generate(prompt, salt="alice")
    assert own.cached == 399 // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), own)
    assert after.generate(prompt, salt="bob").cached == 200 // B * B
    assert after.generate(prompt, salt="carol").cached == 0
    assert after.generate(prompt).cached == 0
    secret = (store / "salt.key").read_bytes()
    tenants = {entry.meta.tenant for entry in StoreSnapshot(store).entries()}
    assert {tenant_salt(secret, name) for name in ("alice", "bob")} <= tenants


def test_the_desk_tells_the_load(rig: Rig, store: Path) -> None:
    """Asked as the plug-in asks, from another process, while it computes."""
    worker = rig.worker("qwen3", connectors.ours(store), max_num_batched_tokens=64)
    asked = [worker.submit(tiny.prompt(1500, seed=62 + n), max_tokens=4) for n in range(4)]
    loads = [_load(store)]
    until(lambda: loads.append(_load(store)) or loads[-1].running_sequences, what="a first step")
    load = loads[-1]
    assert 0 < load.pending_prefill_tokens < 4 * 1500
    assert 0 < load.running_sequences + load.waiting_sequences <= 4
    assert 0 < load.kv_bytes_free + load.kv_bytes_evictable < load.kv_bytes_total
    assert load.kv_bytes_total == 255 * B * worker.hook("fill_kv_bytes")
    assert isinstance(ask(store, Probe(Seed(1000))), Admit)
    assert ask(store, Probe(Seed(3000))) == Reject(WorkerRefusal.TOO_LONG)
    worker.wait(asked)
    settle(worker)
    idle = _load(store)
    assert (idle.pending_prefill_tokens, idle.running_sequences, idle.waiting_sequences) == (0,) * 3
    worker.shutdown()
    assert not (store / "rpc.address").exists()


def test_a_router_hears_of_what_is_stored(rig: Rig, store: Path) -> None:
    """On vLLM's own event stream, with the hashes that vLLM gave its own blocks."""
    endpoint = f"ipc://{tempfile.mkdtemp(prefix='kv-')}/e"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    worker = rig.worker("qwen3", connectors.ours(store), kv_events_config=events)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        time.sleep(0.3)  # a subscription takes a moment to reach the publisher
        worker.generate(tiny.prompt(300, seed=64), session="s", max_tokens=2)
        settle(worker)
        told = list(_events(subscriber))
    stored = [event for event in told if event["type"] == "BlockStored"]
    ours = [event for event in stored if event["medium"] == "STORAGE"]
    own = [event for event in stored if event["medium"] == "GPU"]
    hashes = [block for event in ours for block in event["block_hashes"]]
    assert len(hashes) == 300 // B
    assert set(hashes) <= {block for event in own for block in event["block_hashes"]}
    assert {(event["ownership"], event["session_id"]) for event in ours} == {("ownerserve", "s")}


def test_what_decoding_leaves_of_recurrent_state_is_a_prefills(rig: Rig, tmp_path: Path) -> None:
    """The state at a boundary, once passed while decoding and once prefilled, compared as stored.

    Where boundaries lie follows from how large the state is: its type is transformers' default.
    """
    decoded = rig.worker("qwen3next", connectors.ours(tmp_path / "decoded"))
    block = decoded.ask("pool")["block_tokens"]
    end = -(-500 // block) * block
    prompt = tiny.prompt(end - 12, seed=65)
    answer = decoded.generate(prompt, max_tokens=40)
    settle(decoded)
    decoded.shutdown()
    prefilled = rig.worker("qwen3next", connectors.ours(tmp_path / "prefilled"))
    prefilled.generate([*prompt, *answer.tokens][: end + 1], max_tokens=1)
    settle(prefilled)
    prefilled.shutdown()
    of_decoding, of_prefill = _states(tmp_path / "decoded"), _states(tmp_path / "prefilled")
    for name in ("conv", "recurrent"):
        there = of_prefill[name, end]
        assert _distance(of_decoding[name, end], there) < RECURRENT_NOISE
        assert _distance(of_decoding[name, end - block], there) > 30 * RECURRENT_NOISE


def _load(store: Path) -> WorkerLoad:
    answer = ask(store, Status())
    assert isinstance(answer, StatusIs)
    return answer.status


def _events(subscriber: Any) -> Any:
    while subscriber.poll(10_000):
        _, _, payload = subscriber.recv_multipart()
        yield from msgspec.msgpack.decode(payload)[1]


def _states(store: Path) -> dict[tuple[str, int], Any]:
    """Recurrent state in a store by component and position, as numbers."""
    import torch

    snapshot = StoreSnapshot(store)
    found = {}
    for entry in snapshot.entries():
        meta = entry.meta
        if meta.component in ("conv", "recurrent"):
            data = bytearray(snapshot.read([Want(meta.id)]).parts[0].data)
            scalar = msgspec.msgpack.decode(meta.descriptor)["scalar"]
            numbers = torch.frombuffer(data, dtype=getattr(torch, scalar))
            found[meta.component, meta.end_token] = numbers
    return found


def _distance(one: Any, other: Any) -> float:
    """Relative."""
    return float((one.float() - other.float()).norm() / other.float().norm())
