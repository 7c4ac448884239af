"""What a worker tells a router: its life, its load, what it will hold, and for whom a turn is."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from ownerserve.engines.hf.http.answering import (
    ApiError,
    check_target,
    error_response,
    load_headers,
    turn_headers,
)
from ownerserve.engines.hf.scheduling.requests import Admitted, EngineRequest, Stopping
from ownerserve.gateway.stamps import (
    Stamp,
    WorkerRefusal,
    read_stamp,
    refusal_of,
)
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import Epoch, ExecutionMode, RoutingUnit, Term
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.wire.headers import PREFIX
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.ownership.ownership import OwnerIs
from ownerserve.node.vocabulary.chains import PromptPrefixes

LIFE = 1_700_000_000_123_456_789
LOAD = WorkerLoad(
    RoutingUnit(WorkerId("w"), 0, Incarnation(LIFE)), 1234.5,
    pending_prefill_tokens=700, running_sequences=3, waiting_sequences=2,
    kv_bytes_free=20, kv_bytes_total=100, kv_bytes_evictable=40,
)  # fmt: skip


def as_heard(headers: dict[str, str]) -> dict[bytes, bytes]:
    """Through the gateway's own reading of names."""
    return {
        name.removeprefix(PREFIX).encode(): value.encode()
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }


REQUEST = EngineRequest(request_id="r", prompt=list(range(100)), stopping=Stopping(max_tokens=4))
OWNER = OwnerIs(RoutingUnit(WorkerId("another"), 0, Incarnation(7)), Epoch(Term(1, 2), 3))


def stamp_of(headers: dict[str, str]) -> Stamp:
    refused: Counter[str] = Counter()
    stamp = read_stamp(WorkerId("w"), as_heard(headers), refused)
    assert not refused
    return stamp


def headers_of(prompt: list[int], owner: OwnerIs | None = None) -> dict[str, str]:
    request = replace(REQUEST, prompt=prompt, prefix=PromptPrefixes(16).of(prompt, None))
    return turn_headers(request, Admitted(32, ExecutionMode.RESEED, lost_tokens=16), LOAD, owner)


def test_a_gateway_reads_what_a_worker_writes() -> None:
    prompt = list(range(100))
    stamp = stamp_of(headers_of(prompt))
    assert stamp.unit == RoutingUnit(WorkerId("w"), 0, Incarnation(LIFE))
    heard = stamp.status
    assert heard is not None
    assert heard.as_of == 1234.5
    assert (heard.running_sequences, heard.waiting_sequences) == (3, 2)
    assert (heard.kv_bytes_free, heard.kv_bytes_evictable, heard.kv_bytes_total) == (20, 40, 100)
    assert stamp.extent is not None
    assert stamp.extent.tokens == 96
    assert stamp.extent.prefix_hash == hash_prefix(pack(prompt), 16)[-1]
    assert (stamp.mode, stamp.lost_tokens, stamp.owned) == (ExecutionMode.RESEED, 16, None)
    assert stamp_of(load_headers(LOAD)).status == heard


def test_a_guest_names_the_owner_and_an_owner_itself_with_its_version() -> None:
    guest = headers_of([1, 2, 3], OWNER)
    told = stamp_of(guest).owned
    assert told is not None
    assert (told.unit, told.epoch, told.version) == (OWNER.unit, OWNER.epoch, 0)
    assert "x-ownerserve-version" not in guest
    own = headers_of([1, 2, 3], OwnerIs(LOAD.unit, OWNER.epoch, 4))
    told = stamp_of(own).owned
    assert told is not None
    assert told.unit == RoutingUnit(WorkerId("w"), 0, Incarnation(LIFE)) and told.version == 4
    assert (own["x-ownerserve-epoch"], own["x-ownerserve-version"]) == ("1.2.3", "4")


def test_a_prompt_shorter_than_a_block_leaves_nothing_to_find() -> None:
    assert stamp_of(headers_of([1, 2, 3])).extent is None


def test_a_worker_takes_what_is_meant_for_its_life_and_nothing_else() -> None:
    """Seed 003, v2: two counters drifted apart, and sessions ended on workers that had none."""
    stamp = stamp_of(load_headers(LOAD))
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
