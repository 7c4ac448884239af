"""The header line that a worker sends up with each answer: who speaks, its load, what came of it.

    x-ownerserve-answer: {"unit":["w0",0,17..],"load":{"as_of_s":1.5,..},"mode":"seed",..}

| field | is |
|---|---|
| unit | [worker, rank, incarnation]: who speaks, by its own name |
| load | its load, dated, in the words of kv/wire/status.py |
| owner | who owns the turn's session, as far as was heard: itself, or whose guest the turn is |
| epoch | [[ordinal, nonce], counter]: under which the owner does |
| version | turns that the session's owners finished; the owner alone says it |
| tip, tokens | prefix hash, 64 hex: the device holds [0, tokens) of the prompt once computed |
| mode, lost_tokens | what came of the prompt (kv/execution.py) |

Read field by field: one in a wrong form counts as not said and is named, the others stand. Fields
that a reader does not know are for later versions of it, and are passed over. Only gateways read
the line, and they pass it on to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from ownerserve.kv.epoch import COUNTER_LIMIT, Epoch
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.ids import INCARNATION_MAX
from ownerserve.kv.messages import ExecutionMode, RoutingUnit
from ownerserve.kv.wire.status import COUNT_MAX, Count, LoadStatement

HEADER = "x-ownerserve-answer"
LINE_BYTES_MAX = 4096
_Tip = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class AnswerLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """What a worker says beside its answer."""

    unit: RoutingUnit | None = None
    load: LoadStatement | None = None
    owner: RoutingUnit | None = None
    epoch: Epoch | None = None
    version: Count | None = None
    tip: _Tip | None = None
    tokens: Count = 0
    mode: ExecutionMode | None = None
    lost_tokens: Count = 0


class AnswerRead(msgspec.Struct, frozen=True):
    """A line as it was read, and the fields that were refused ("line": all of it)."""

    line: AnswerLine
    refused: tuple[str, ...] = ()


NOTHING = AnswerLine()

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(AnswerLine)
_FIELDS = {field.name: field.type for field in msgspec.structs.fields(AnswerLine)}


def encode(line: AnswerLine) -> bytes:
    """The header's value."""
    return _ENCODER.encode(line)


def read(value: bytes) -> AnswerRead:
    """The line in a header's value. Never raises."""
    if len(value) > LINE_BYTES_MAX:
        return AnswerRead(NOTHING, ("line",))
    try:
        line = _DECODER.decode(value)
    except (msgspec.ValidationError, InvalidInput):
        return _by_field(value)
    except UNREADABLE:
        return AnswerRead(NOTHING, ("line",))
    unit, owner, epoch = line.unit, line.owner, line.epoch
    is_sound = (
        (unit is None or _is_unit(unit))
        and (owner is None or _is_unit(owner))
        and (epoch is None or _is_epoch(epoch))
    )
    return AnswerRead(line) if is_sound else _by_field(value)


def _by_field(value: bytes) -> AnswerRead:
    """What can be used of a line of which something is wrong."""
    try:
        found = msgspec.json.decode(value)
    except UNREADABLE:
        return AnswerRead(NOTHING, ("line",))
    if not isinstance(found, dict):
        return AnswerRead(NOTHING, ("line",))
    good: dict[str, Any] = {}
    refused = []
    for name, kind in _FIELDS.items():
        if name not in found:
            continue
        try:
            said = msgspec.convert(found[name], kind)
        except (*UNREADABLE, InvalidInput):
            refused.append(name)
            continue
        if _can_be(name, said):
            good[name] = said
        else:
            refused.append(name)
    return AnswerRead(AnswerLine(**good), tuple(refused))


def _can_be(name: str, said: Any) -> bool:
    """Whether the field's numbers are such as there are."""
    check = _CHECKED.get(name)
    return said is None or check is None or check(said)


def _is_unit(unit: RoutingUnit) -> bool:
    return 0 < unit.incarnation <= INCARNATION_MAX and 0 <= unit.dp_rank <= COUNT_MAX


def _is_epoch(epoch: Epoch) -> bool:
    return 0 <= epoch.counter < COUNTER_LIMIT


_CHECKED: dict[str, Callable[[Any], bool]] = {
    "unit": _is_unit,
    "owner": _is_unit,
    "epoch": _is_epoch,
}
