"""The line that a gateway sends down with each turn: written and read in one place."""

from __future__ import annotations

import pytest

from ownerserve.kv.epoch import Epoch, Term
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.turn_line import (
    HEADER,
    TurnLine,
    decode,
    encode,
    read_session_id,
    received,
    session_id_of,
)

NAME, PARENT, GROUP = (SessionId(digit * 32) for digit in "abc")
UNIT = RoutingUnit(WorkerId("10.0.0.1:8100"), 3, Incarnation(1_700_000_000_000_000_000))


@pytest.mark.parametrize(
    "line",
    [
        TurnLine(),
        TurnLine(name=NAME),
        TurnLine(target=UNIT),
        TurnLine(name=NAME, epoch=Epoch(Term(3, (1 << 48) - 1), 7), version=0),
        TurnLine(name=NAME, parent=PARENT, group=GROUP, final=True, target=UNIT),
    ],
)
def test_a_worker_reads_what_a_gateway_writes(line: TurnLine) -> None:
    value = encode(line).decode("latin-1")
    assert decode(value) == line
    assert received({HEADER: value}) == line


def test_without_a_gateway_there_is_no_line() -> None:
    assert received({"x-session-id": "mine"}) is None


def test_the_words_on_the_wire_are_these() -> None:
    """A fleet may run two versions during an upgrade."""
    line = TurnLine(name=NAME, parent=PARENT, final=True, target=UNIT)
    assert encode(line).decode() == (
        f'{{"name":"{NAME}","parent":"{PARENT}","final":true,'
        '"target":["10.0.0.1:8100",3,1700000000000000000]}'
    )


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert decode(f'{{"name":"{NAME}","nonce":3,"verb":"serve"}}') == TurnLine(name=NAME)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ('{"name":"abc"}', f"{HEADER}.name"),
        (f'{{"name":"{NAME}\\n"}}', f"{HEADER}.name"),
        (f'{{"name":"{NAME.upper()}"}}', f"{HEADER}.name"),
        ('{"name":7}', f"{HEADER}.name"),
        ('{"parent":"x"}', f"{HEADER}.parent"),
        ('{"group":""}', f"{HEADER}.group"),
        ('{"final":"yes"}', f"{HEADER}.final"),
        ('{"epoch":7}', f"{HEADER}.epoch"),
        ('{"epoch":[[1,2],"x"]}', f"{HEADER}.epoch[1]"),
        (f'{{"epoch":[[{1 << 48},2],1]}}', f"{HEADER}.epoch"),
        (f'{{"epoch":[[1,2],{1 << 70}]}}', f"{HEADER}.epoch"),
        ('{"epoch":[[1,2],-1]}', f"{HEADER}.epoch"),
        ('{"version":-1}', f"{HEADER}.version"),
        ('{"version":"3"}', f"{HEADER}.version"),
        ('{"target":"w/0/1"}', f"{HEADER}.target"),
        ('{"target":["w",0]}', f"{HEADER}.target"),
        ('{"target":["w",0,"1"]}', f"{HEADER}.target[2]"),
        ("[]", HEADER),
        ("", HEADER),
        ("mine", HEADER),
        ('{"name":"\xe9"}', HEADER),
        ("\u20ac", HEADER),
        ("[" * 4000, HEADER),
        (" " * 5000, HEADER),
    ],
)
def test_a_broken_line_is_one_error_that_names_its_field(value: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(value)
    assert caught.value.field == field


def test_an_engine_that_knows_one_text_gets_the_name_and_the_end_in_it() -> None:
    for line in (TurnLine(name=NAME), TurnLine(name=NAME, final=True)):
        assert read_session_id(session_id_of(line)) == line


@pytest.mark.parametrize("own", ["abc", "abc;final", ";final", "a" * 300])
def test_a_clients_own_session_id_is_taken_as_it_is(own: str) -> None:
    assert read_session_id(own) == TurnLine(name=SessionId(own))
