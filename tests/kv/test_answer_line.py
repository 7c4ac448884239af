"""The line that a worker sends up with each answer: read as written, refused field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ownerserve.kv.ids import INCARNATION_MAX, Incarnation, WorkerId
from ownerserve.kv.messages import Epoch, ExecutionMode, RoutingUnit, Term
from ownerserve.kv.wire.headers import (
    LINE_BYTES_MAX,
    NO_ANSWER_LINE,
    AnswerLine,
    AnswerRead,
    brought_text,
    encode_answer_line,
    read_answer_line,
    read_brought,
)
from ownerserve.kv.wire.status import LoadStatement, RefillShare

UNIT = RoutingUnit(WorkerId("w0"), 3, Incarnation(1_700_000_000_000_000_001))
WHOLE = AnswerLine(
    unit=UNIT,
    load=LoadStatement(
        as_of_s=1234.5,
        pending_prefill_tokens=9,
        kv_bytes_total=1 << 40,
        refill_shares=(RefillShare(0, 0.25), RefillShare(8192, 1.5)),
        busy_share=0.125,
    ),
    owner=RoutingUnit(WorkerId("w1"), 0, Incarnation(7)),
    epoch=Epoch(Term(3, (1 << 48) - 1), 5),
    version=4,
    tip="ab" * 32,
    tokens=640,
    mode=ExecutionMode.RESEED,
    lost_tokens=16,
)


@pytest.mark.parametrize("line", [NO_ANSWER_LINE, AnswerLine(unit=UNIT), WHOLE])
def test_what_is_written_is_read(line: AnswerLine) -> None:
    assert read_answer_line(encode_answer_line(line)) == AnswerRead(line)
    assert len(encode_answer_line(line)) < LINE_BYTES_MAX


def test_the_words_on_the_wire_are_these() -> None:
    assert json.loads(encode_answer_line(WHOLE)) == {
        "unit": ["w0", 3, 1_700_000_000_000_000_001],
        "load": {
            "as_of_s": 1234.5,
            "pending_prefill_tokens": 9,
            "running_sequences": 0,
            "waiting_sequences": 0,
            "kv_bytes_free": 0,
            "kv_bytes_evictable": 0,
            "kv_bytes_total": 1 << 40,
            "refill_shares": [[0, 0.25], [8192, 1.5]],
            "busy_share": 0.125,
        },
        "owner": ["w1", 0, 7],
        "epoch": [[3, (1 << 48) - 1], 5],
        "version": 4,
        "tip": "ab" * 32,
        "tokens": 640,
        "mode": "reseed",
        "lost_tokens": 16,
    }


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert read_answer_line(b'{"tokens":3,"ticket":{"x":[1]}}') == AnswerRead(AnswerLine(tokens=3))


BAD: dict[str, list[Any]] = {
    "unit": [7, "w0", ["w0", 0], ["w0", 0, "1"], ["w0", -1, 1], ["w0", 0, INCARNATION_MAX + 1],
             ["w0", 0, 0], ["w0", 0, 10**19 - 1]],
    "load": [7, {"as_of_s": -1}, {"as_of_s": 1e300}, {"as_of_s": "soon"},
             {"running_sequences": -1}, {"kv_bytes_free": 1 << 60}, {"busy_share": 1.5},
             {"refill_shares": [[0, -1]]}, {"refill_shares": [[0, 1001]]}],
    "owner": [{}, ["w0", 0, -1]],
    "epoch": [7, [1, 2, 3], [[1, 2]], [[1 << 48, 2], 3], [[1, 2], -3], [[1, 2], 1 << 70],
              [[1, 2], "x"]],
    "version": [-1, "4", 1.5, 1 << 60],
    "tip": ["", "AB" * 32, "ab" * 31, "zz" * 32, 7],
    "tokens": [-1, "3", 1 << 60],
    "mode": ["", "sprint", 7],
    "lost_tokens": [-1, 1 << 60],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "said"), [(field, said) for field, every in BAD.items() for said in every]
)
def test_a_bad_field_is_refused_by_its_name_and_the_others_stand(field: str, said: Any) -> None:
    document = json.loads(encode_answer_line(WHOLE)) | {field: said}
    found = read_answer_line(json.dumps(document).encode())
    assert found.refused == (field,)
    default = getattr(NO_ANSWER_LINE, field)
    assert getattr(found.line, field) == default
    for name in WHOLE.__struct_fields__:
        if name != field:
            assert getattr(found.line, name) == getattr(WHOLE, name)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[1]",
        b"7",
        b"\xff",
        b'{"unit":7',
        b"[" * 4000,
        b'{"tip":"' + b"a" * 5000 + b'"}',
    ],
)
def test_what_is_no_line_is_refused_whole(value: bytes) -> None:
    assert read_answer_line(value) == AnswerRead(NO_ANSWER_LINE, ("line",))


def test_what_was_brought_is_read_as_written_and_other_words_are_passed_over() -> None:
    brought = {"host": 512, "remote_prefill": 96}
    assert brought_text(brought) == "host=512, remote_prefill=96"
    assert read_brought(brought_text(brought)) == brought
    assert read_brought("host=1, disk, peer=-3, later=7;of=9") == {"host": 1}
    assert read_brought("") == {}
