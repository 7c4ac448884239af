"""What a worker takes of turns is stated, and changed while it is idle."""

from __future__ import annotations

import pytest

from ownerserve.engines.hf.http.role import (
    AskedRole,
    NotIdle,
    RoleFlipped,
    StatedRole,
    read_asked_role,
)
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.status import ROLES, LoadStatement
from ownerserve.router.worker import WorkerRole

IDLE, RUNS, WAITS = (
    LoadStatement(),
    LoadStatement(running_sequences=2),
    LoadStatement(waiting_sequences=1),
)


def test_gateways_know_every_role_that_a_worker_can_have() -> None:
    assert set(ROLES) == {role.value for role in WorkerRole}


def test_an_idle_worker_takes_another_role_on() -> None:
    role = StatedRole("hybrid")
    assert role.flip(AskedRole("decode"), IDLE) == RoleFlipped("decode", "hybrid")
    assert role.flip(AskedRole("prefill"), IDLE) == RoleFlipped("prefill", "decode")
    assert role.now == "prefill"


@pytest.mark.parametrize("load", [RUNS, WAITS])
def test_a_worker_keeps_its_role_while_a_turn_is_there(load: LoadStatement) -> None:
    role = StatedRole("hybrid")
    came = role.flip(AskedRole("prefill"), load)
    assert came == NotIdle(load.running_sequences, load.waiting_sequences)
    assert "while it is idle" in str(came)
    assert role.now == "hybrid"
    assert role.flip(AskedRole("hybrid"), load) == RoleFlipped("hybrid", "hybrid"), "as it is"


@pytest.mark.parametrize(
    ("content_type", "body", "field"),
    [
        ("text/plain", b'{"role": "decode"}', "content-type"),
        ("", b'{"role": "decode"}', "content-type"),
        ("application/json", b'{"role": "both"}', "role"),
        ("application/json", b'{"role": "decode", "now": true}', "role"),
        ("application/json", b'{"role": ["decode"]}', "role"),
        ("application/json", b"{}", "role"),
        ("application/json", b"decode", "role"),
        ("application/json", b"\xff", "role"),
    ],
)
def test_a_role_that_is_none_is_refused_by_what_is_wrong(
    content_type: str, body: bytes, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_asked_role(content_type, body)
    assert caught.value.field == field


def test_a_role_is_read_from_json() -> None:
    said = read_asked_role("Application/JSON; charset=utf-8", b'{"role": "decode"}')
    assert said == AskedRole("decode")
