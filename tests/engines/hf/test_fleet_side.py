"""What a worker tells a router: its life, its load, what it will hold, and for whom a turn is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec

from ownerserve.engines.hf.answering import (
    ApiError,
    check_target,
    error_response,
    extent_header,
    load_headers,
)
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.chains import PromptPrefixes
from ownerserve.router.gateway.stamps import (
    PREFIX,
    WorkerRefusal,
    read_stamp,
    refusal_of,
)

LIFE = 1_700_000_000_123_456_789
LOAD = WorkerLoad(
    RoutingUnit(WorkerId("w"), 0, Incarnation(LIFE)), 1234.5,
    pending_prefill_tokens=700, running_sequences=3, waiting_sequences=2,
    kv_bytes_free=20, kv_bytes_total=100, kv_bytes_evictable=40,
)  # fmt: skip


def as_heard(headers: dict[str, str]) -> dict[bytes, bytes]:
    """Through the gateway's own reading of names."""
    return {
        name.encode()[len(PREFIX) :]: value.encode()
        for name, value in headers.items()
        if name.encode().startswith(PREFIX)
    }


def test_a_gateway_reads_what_a_worker_writes() -> None:
    prompt = list(range(100))
    headers = {**load_headers(LOAD), **extent_header(PromptPrefixes(16).of(prompt, None), 16)}
    stamp = read_stamp(WorkerId("w"), as_heard(headers))
    assert stamp is not None
    assert stamp.unit.incarnation == LIFE
    assert stamp.status is not None
    assert stamp.status.as_of == 1234.5
    assert (stamp.status.running_sequences, stamp.status.waiting_sequences) == (3, 2)
    heard = stamp.status
    assert (heard.kv_bytes_free, heard.kv_bytes_evictable, heard.kv_bytes_total) == (20, 40, 100)
    assert stamp.extent is not None
    assert stamp.extent.tokens == 96
    assert stamp.extent.prefix_hash == hash_prefix(pack(prompt), 16)[-1]


@pytest.mark.parametrize("as_of", ["nan", "inf", "-1", "1e300", "soon"])
def test_a_stamp_from_no_time_is_not_taken(as_of: str) -> None:
    headers = {**load_headers(LOAD), "x-ownerserve-as-of": as_of}
    stamp = read_stamp(WorkerId("w"), as_heard(headers))
    assert stamp is not None and stamp.status is None


@pytest.mark.parametrize("told", ["1.2.3", "1.2", "1.2.x", "1.2.-3", f"{1 << 48}.2.3", ""])
def test_an_epoch_is_three_numbers_or_none(told: str) -> None:
    headers = {**load_headers(LOAD), "x-ownerserve-epoch": told}
    stamp = read_stamp(WorkerId("w"), as_heard(headers))
    assert stamp is not None
    assert (stamp.epoch is not None) == (told == "1.2.3")


def test_a_prompt_shorter_than_a_block_leaves_nothing_to_find() -> None:
    assert extent_header(PromptPrefixes(16).of([1, 2, 3], None), 16) == {}


def test_a_worker_takes_what_is_meant_for_its_life_and_nothing_else() -> None:
    """Seed 003, v2: two counters drifted apart, and sessions ended on workers that had none."""
    stamp = read_stamp(WorkerId("10.0.0.1:80"), as_heard(load_headers(LOAD)))
    assert stamp is not None
    check_target(None, LIFE)
    check_target(stamp.unit, LIFE)
    for rank, life in ((1, LIFE), (0, LIFE + 1), (0, 0)):
        wrong = RoutingUnit(WorkerId("10.0.0.1:80"), rank, Incarnation(life))
        with pytest.raises(ApiError) as caught:
            check_target(wrong, LIFE)
        answer = error_response(caught.value)
        assert msgspec.json.decode(answer.body)["error"]["code"] == "wrong_target"
        heard = as_heard(dict(answer.headers))
        assert refusal_of(answer.status_code, heard) is WorkerRefusal.WRONG_TARGET
