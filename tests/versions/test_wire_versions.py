"""Two versions in one fleet, message by message: what earlier trees wrote is read, what they need
is still said, and what a later one may add is passed over.

`golden/REV.json` is what the tree at that revision wrote (support/versions/wire_samples.py makes
it): the one that was running last, and an older one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.versions.wire_samples import (
    Sample,
    Wire,
    disagreements,
    fields_of,
    samples,
    unread,
    wires,
)

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
LATER = "of_a_later_version"
JSON_WIRES = ("turn line", "answer line", "worker status", "inventory page")


def recorded(path: Path) -> list[Sample]:
    return msgspec.json.decode(path.read_bytes(), type=list[Sample])


def raw(one: Sample) -> Any:
    """The message as anybody reads it who knows no types."""
    decode = msgspec.json.decode if one.wire in JSON_WIRES else msgspec.msgpack.decode
    return decode(bytes.fromhex(one.data))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_an_earlier_version_wrote_is_read_as_it_was_meant(path: Path) -> None:
    given = recorded(path)
    assert len(given) >= 116
    assert not list(unread(given))
    known = {(wire.name, kind.__name__) for wire in wires() for kind in wire.kinds}
    assert {(one.wire, one.kind) for one in given} <= known, "a message is gone"


def lacking(needed: Any, said: Any, where: str) -> list[str]:
    """Which of the fields that must be there are not said any more."""
    if isinstance(needed, dict):
        missing = [f"{where}.{name}" for name in needed.keys() - said.keys()]
        return missing + [
            why
            for name in needed.keys() & said.keys()
            for why in lacking(needed[name], said[name], f"{where}.{name}")
        ]
    if isinstance(needed, list):
        if len(said) < len(needed):
            return [f"{where}: {len(said)} of {len(needed)}"]
        return [
            why
            for number, one in enumerate(needed)
            for why in lacking(one, said[number], f"{where}[{number}]")
        ]
    return [] if type(needed) is type(said) else [f"{where}: {said!r}"]


LAST = "0533b9e"
"""The version that may run beside this one; of older ones only what they wrote is read."""


def test_what_the_last_version_needs_is_still_said() -> None:
    now = {(one.wire, one.kind, one.form): one for one in samples(wires())}
    for one in recorded(Path(__file__).parent / "golden" / f"{LAST}.json"):
        mine = now[one.wire, one.kind, one.form]
        if one.form == "least":
            assert not lacking(raw(one), raw(mine), f"{one.wire} {one.kind}")


def widened(value: Any) -> Any:
    """A message with one more field in each object of it."""
    if isinstance(value, dict):
        return {name: widened(one) for name, one in value.items()} | {LATER: {"n": 1}}
    if isinstance(value, list):
        return [widened(one) for one in value]
    return value


def encoded(one: Sample) -> bytes:
    wide = widened(raw(one))
    if one.wire in JSON_WIRES:
        return msgspec.json.encode(wide)
    return msgspec.msgpack.encode([*wide, LATER])  # a frame, or a record: arrays, which grow too


COUNTS_BY_NAME = ("StatusAnswer",)
"""Messages with a dictionary, in which any name is an entry."""


@pytest.mark.parametrize("wire", wires(), ids=lambda wire: wire.name)
def test_what_a_later_version_adds_is_passed_over(wire: Wire) -> None:
    for one in samples([wire]):
        if one.kind in COUNTS_BY_NAME or (wire.name.startswith("node rpc") and one.form == "least"):
            continue  # their frames have a nonce as last element, which is not said then
        read = wire.decode(encoded(one))
        assert fields_of(read) == one.fields, one.kind


def test_a_message_that_says_less_or_otherwise_is_found() -> None:
    (some,) = [one for one in samples(wires()) if (one.kind, one.form) == ("Advance", "full")]
    other = msgspec.structs.replace(some, fields={**some.fields, "version": 8})
    assert [why.rpartition(".")[2] for why in unread([other])] == ["version: 8 was said, 7 is read"]
    assert list(disagreements({"a": [1]}, {"a": [1, 2]}))
    broken = msgspec.structs.replace(some, data=some.data[:-4])
    assert list(unread([broken]))
    assert lacking({"a": 1, "b": [1, 2]}, {"b": [1]}, "") == [".a", ".b: 1 of 2"]
