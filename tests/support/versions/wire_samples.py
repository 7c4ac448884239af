"""One sample of every message that OwnerServe's processes send each other, as the tree that is
imported writes it: with all fields, and with those alone that must be there.

    PYTHONPATH=TREE/src python tests/support/versions/wire_samples.py > REV.json
    PYTHONPATH=TREE/src python tests/support/versions/wire_samples.py --read < REV.json

It imports nothing of the tests, so that an older tree can be made to speak.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import inspect

from ownerserve.directory.decisions import records
from ownerserve.directory.messages import Outcome, Request
from ownerserve.directory.rpc import frames
from ownerserve.kv.wire import headers, inventory, rpc, status

FORMS = ("full", "least")
ODD = {"rpc": "tcp://127.0.0.1:7000"}
"""Fields in which not any text will do."""


class Wire(NamedTuple):
    """What is said somewhere, as bytes and back; `kinds` are its messages."""

    name: str
    kinds: tuple[Any, ...]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def wires() -> list[Wire]:
    """All of them, by this tree's own code."""
    return [
        Wire(
            "node rpc request",
            (*get_args(rpc.RpcRequest), rpc.Cancel),
            lambda body: rpc.encode(body, rpc.Nonce(5)),
            lambda data: rpc.decode_request(data)[0],
        ),
        Wire("node rpc answer", get_args(rpc.Said), rpc.encode, rpc.decode_answer),
        Wire(
            "directory request",
            get_args(Request),
            lambda one: frames.encode(frames.RequestBatch((one,))),
            lambda data: _only(frames.decode_question(data), "requests"),
        ),
        Wire(
            "directory outcome",
            get_args(Outcome),
            lambda one: frames.encode(frames.Outcomes((one,))),
            lambda data: _only(frames.decode_answer(data), "outcomes"),
        ),
        Wire(
            "directory question",
            (frames.StatusQuestion, frames.ForgetAll),
            frames.encode,
            frames.decode_question,
        ),
        Wire(
            "directory answer",
            (frames.StatusAnswer, frames.FrameFailed),
            frames.encode,
            frames.decode_answer,
        ),
        Wire(
            "directory record",
            get_args(records.Record),
            records.encode_record,
            records.decode_record,
        ),
        Wire(
            "turn line",
            (headers.TurnLine,),
            headers.encode_turn_line,
            lambda data: headers.decode_turn_line(data.decode("latin-1")),
        ),
        Wire("answer line", (headers.AnswerLine,), headers.encode_answer_line, _answer_line),
        Wire("worker status", (status.WorkerStatus,), msgspec.json.encode, _status),
        Wire("inventory page", (inventory.Page,), msgspec.json.encode, inventory.decode_page),
    ]


def _only(frame: Any, field: str) -> Any:
    (one,) = getattr(frame, field)
    return one


def _answer_line(data: bytes) -> Any:
    read = headers.read_answer_line(data)
    assert not read.refused, read.refused
    return read.line


def _status(data: bytes) -> Any:
    read = status.read_status(data)
    assert not read.problems, read.problems
    return read.status


def sample(kind: Any, form: str) -> Any:
    """A message of that type."""
    return _value(inspect.type_info(kind), form)


def _value(kind: inspect.Type, form: str) -> Any:
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            said = (field for field in fields if field.required or form == "full")
            values = {field.name: _value(field.type, form) for field in said}
            return cls(**(values | {name: ODD[name] for name in values.keys() & ODD.keys()}))
        case inspect.UnionType(types=types):
            some = [one for one in types if not isinstance(one, inspect.NoneType)]
            return _value(some[0], form)
        case inspect.VarTupleType(item_type=item):
            return (_value(item, form),) if form == "full" else ()
        case inspect.TupleType(item_types=items):
            return tuple(_value(item, form) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key, form): _value(value, form)} if form == "full" else {}
        case inspect.StrType(pattern=pattern):
            return "ab" * (32 if pattern and "64" in pattern else 16)
        case inspect.EnumType(cls=cls):
            return list(cls)[-1]
        case inspect.IntType():
            return 7
        case inspect.FloatType(le=most):
            return 2.5 if most is None else min(2.5, most)
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return bytes(range(32))
        case inspect.CustomType(cls=cls) if issubclass(cls, IntEnum):
            return list(cls)[-1]
    raise TypeError(f"no sample of {kind}")


class Sample(msgspec.Struct, frozen=True):
    """One message as a tree wrote it; `fields` is what that tree reads in it."""

    wire: str
    kind: str
    form: str
    data: str
    fields: Any


def fields_of(message: Any) -> Any:
    """What is in a message, as JSON values."""
    return json.loads(msgspec.json.encode(_named(message)))


def _named(value: Any) -> Any:
    """The value with all structs as objects by field, also those that are arrays on a wire."""
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _named(one) for key, one in value.items()}
    return value


def samples(from_wires: Iterable[Wire]) -> Iterator[Sample]:
    """Each message in each form."""
    for wire in from_wires:
        for kind in wire.kinds:
            for form in FORMS:
                data = wire.encode(sample(kind, form))
                read = fields_of(wire.decode(data))
                yield Sample(wire.name, kind.__name__, form, data.hex(), read)


def disagreements(said: Any, read: Any, where: str = "") -> Iterator[str]:
    """Where two trees read one message otherwise: what both know must be the same."""
    if isinstance(said, dict) and isinstance(read, dict):
        for name in said.keys() & read.keys():
            yield from disagreements(said[name], read[name], f"{where}.{name}")
    elif isinstance(said, list) and isinstance(read, list) and len(said) == len(read):
        for number, (one, other) in enumerate(zip(said, read, strict=True)):
            yield from disagreements(one, other, f"{where}[{number}]")
    elif said != read:
        yield f"{where}: {said!r} was said, {read!r} is read"


def unread(given: Iterable[Sample]) -> Iterator[str]:
    """Read another tree's messages; yield what this tree can't read or reads otherwise. A kind that
    this tree does not know is left out: nobody sends it to such a tree unasked."""
    by_name = {wire.name: wire for wire in wires()}
    for one in given:
        wire = by_name.get(one.wire)
        if wire is None or one.kind not in {kind.__name__ for kind in wire.kinds}:
            continue
        try:
            message = wire.decode(bytes.fromhex(one.data))
        except Exception as error:  # noqa: BLE001 - whatever a tree raises is what was found
            yield f"{one.wire} {one.kind} ({one.form}): {error!r}"
            continue
        for why in disagreements(one.fields, fields_of(message)):
            yield f"{one.wire} {one.kind} ({one.form}){why}"


def main(words: list[str]) -> int:
    """Write samples, or with `--read` read those on stdin: 1 when one of them can't be read."""
    if words != ["--read"]:
        lines = (msgspec.json.encode(one).decode() for one in samples(wires()))
        sys.stdout.write("[\n" + ",\n".join(lines) + "\n]\n")
        return 0
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Sample])
    wrong = list(unread(given))
    print(*wrong, f"{len(given)} messages, {len(wrong)} wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
