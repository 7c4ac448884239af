"""The line that a gateway sends down with each turn: written and read in one place."""

from __future__ import annotations

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.headers import (
    TURN_HEADER,
    LenderAddress,
    TurnLine,
    decode_turn_line,
    encode_turn_line,
    read_session_id,
    received_turn_line,
    session_id_of,
)

NAME, PARENT, GROUP = (SessionId(digit * 32) for digit in "abc")
UNIT = RoutingUnit(WorkerId("10.0.0.1:8100"), 3, Incarnation(1_700_000_000_000_000_000))
LENDER = LenderAddress(UNIT, "tcp://10.0.0.1:8101")


@pytest.mark.parametrize(
    "line",
    [
        TurnLine(),
        TurnLine(name=NAME),
        TurnLine(target=UNIT),
        TurnLine(name=NAME, epoch=Epoch(Term(3, (1 << 48) - 1), 7), version=0),
        TurnLine(name=NAME, parent=PARENT, group=GROUP, final=True, target=UNIT),
        TurnLine(name=NAME, target=UNIT, bring_from=LENDER),
        TurnLine(name=NAME, target=UNIT, decode_from=LENDER),
        TurnLine(name=NAME, target=UNIT, decode_from=LENDER, nonce=(1 << 63) - 1),
        TurnLine(target=UNIT, nonce=1, prefill=True),
    ],
)
def test_a_worker_reads_what_a_gateway_writes(line: TurnLine) -> None:
    value = encode_turn_line(line).decode("latin-1")
    assert decode_turn_line(value) == line
    assert received_turn_line({TURN_HEADER: value}) == line


def test_without_a_gateway_there_is_no_line() -> None:
    assert received_turn_line({"x-session-id": "mine"}) is None


def test_the_words_on_the_wire_are_these() -> None:
    """A fleet may run two versions during an upgrade."""
    line = TurnLine(name=NAME, parent=PARENT, final=True, target=UNIT)
    assert encode_turn_line(line).decode() == (
        f'{{"name":"{NAME}","parent":"{PARENT}","final":true,'
        '"target":["10.0.0.1:8100",3,1700000000000000000]}'
    )


def test_who_computes_a_prompt_is_named_with_its_rpc_address() -> None:
    line = TurnLine(name=NAME, decode_from=LENDER)
    assert encode_turn_line(line).decode() == (
        f'{{"name":"{NAME}",'
        '"decode_from":[["10.0.0.1:8100",3,1700000000000000000],"tcp://10.0.0.1:8101"]}'
    )


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert decode_turn_line(f'{{"name":"{NAME}","when":3,"verb":"serve"}}') == TurnLine(name=NAME)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ('{"name":"abc"}', f"{TURN_HEADER}.name"),
        (f'{{"name":"{NAME}\\n"}}', f"{TURN_HEADER}.name"),
        (f'{{"name":"{NAME.upper()}"}}', f"{TURN_HEADER}.name"),
        ('{"name":7}', f"{TURN_HEADER}.name"),
        ('{"parent":"x"}', f"{TURN_HEADER}.parent"),
        ('{"group":""}', f"{TURN_HEADER}.group"),
        ('{"final":"yes"}', f"{TURN_HEADER}.final"),
        ('{"epoch":7}', f"{TURN_HEADER}.epoch"),
        ('{"epoch":[[1,2],"x"]}', f"{TURN_HEADER}.epoch[1]"),
        (f'{{"epoch":[[{1 << 48},2],1]}}', f"{TURN_HEADER}.epoch"),
        (f'{{"epoch":[[1,2],{1 << 70}]}}', f"{TURN_HEADER}.epoch"),
        ('{"epoch":[[1,2],-1]}', f"{TURN_HEADER}.epoch"),
        ('{"version":-1}', f"{TURN_HEADER}.version"),
        ('{"version":"3"}', f"{TURN_HEADER}.version"),
        ('{"target":"w/0/1"}', f"{TURN_HEADER}.target"),
        ('{"target":["w",0]}', f"{TURN_HEADER}.target"),
        ('{"target":["w",0,"1"]}', f"{TURN_HEADER}.target[2]"),
        ('{"decode_from":["w",0,1]}', f"{TURN_HEADER}.decode_from[0]"),
        ('{"decode_from":[["w",0,1],""]}', f"{TURN_HEADER}.decode_from[1]"),
        ('{"bring_from":[["w",0],"tcp://a:1"]}', f"{TURN_HEADER}.bring_from[0]"),
        ('{"nonce":0}', f"{TURN_HEADER}.nonce"),
        ('{"nonce":9223372036854775808}', f"{TURN_HEADER}.nonce"),
        ('{"prefill":true}', f"{TURN_HEADER}.nonce"),
        ("[]", TURN_HEADER),
        ("", TURN_HEADER),
        ("mine", TURN_HEADER),
        ('{"name":"\xe9"}', TURN_HEADER),
        ("\u20ac", TURN_HEADER),
        ("[" * 4000, TURN_HEADER),
        (" " * 5000, TURN_HEADER),
    ],
)
def test_a_broken_line_is_one_error_that_names_its_field(value: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_turn_line(value)
    assert caught.value.field == field


def test_an_engine_that_knows_one_text_gets_the_name_and_the_end_in_it() -> None:
    for line in (TurnLine(name=NAME), TurnLine(name=NAME, final=True)):
        assert read_session_id(session_id_of(line)) == line


@pytest.mark.parametrize("own", ["abc", "abc;final", ";final", "a" * 300])
def test_a_clients_own_session_id_is_taken_as_it_is(own: str) -> None:
    assert read_session_id(own) == TurnLine(name=SessionId(own))
