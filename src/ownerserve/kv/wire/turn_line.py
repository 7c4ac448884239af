"""The header line that a gateway sends down with each turn: whose turn it is, and for whom.

    x-ownerserve-session: {"name":"<32 hex>","parent":"<32 hex>","target":["10.0.0.1:8100",0,17..]}

| field | is |
|---|---|
| name | the session's only name (router/requests/); without it the turn belongs to no session |
| parent | the session that this one was forked from, by the client's word or by its bytes |
| group | of sessions that share a head, by what they begin with or by the client's word |
| final | true: the session ends with this turn |
| epoch | [[ordinal, nonce], counter]: the highest under which the gateway knows it owned; an |
| | owner under a lower one finds out by it, and serves the turn as a guest |
| version | turns that the session's owners finished, by the last word that the gateway heard: |
| | they count, also where the owner died before it told the directory |
| target | [worker, rank, incarnation]: whom the turn was sent to; another life refuses it |
| reservation | the place that the worker's admission holds for the turn |
| judged | true: an append that was sent unasked; the worker refuses it before any work |

vLLM hands its scheduler one free text of a request, x-session-id: `session_id_of` puts the name
there, with `;final` behind it on the last turn, and `read_session_id` takes it apart again.

Only gateways speak the line: they drop a client's own. Fields that a reader does not know are for
later versions of it, and are passed over; a known field in a wrong form is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ownerserve.kv.epoch import COUNTER_LIMIT, Epoch
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.status import Count

HEADER = "x-ownerserve-session"
ENGINE_HEADER = "x-session-id"
"""Where vLLM reads the session of a request."""
NAME_DIGITS = 32
LINE_BYTES_MAX = 4096

_FINAL = ";final"
_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
_Name = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{NAME_DIGITS}}}\Z")]


class TurnLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """What a worker is told of a turn beside its body."""

    name: SessionId | None = None
    parent: SessionId | None = None
    group: str | None = None
    final: bool = False
    epoch: Epoch | None = None
    version: int | None = None
    target: RoutingUnit | None = None
    reservation: int | None = None
    judged: bool = False


class _Checked(msgspec.Struct, frozen=True, gc=False):
    """The form that a received line must have."""

    name: _Name | None = None
    parent: _Name | None = None
    group: _Name | None = None
    final: bool = False
    epoch: Epoch | None = None
    version: Count | None = None
    target: RoutingUnit | None = None
    reservation: Annotated[int, msgspec.Meta(ge=0)] | None = None
    judged: bool = False


NOTHING = TurnLine()

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Checked)


def encode(line: TurnLine) -> bytes:
    """The header's value."""
    return _ENCODER.encode(line)


def decode(value: str) -> TurnLine:
    """The line in a header's value. Raises InvalidInput that names the field."""
    if len(value) > LINE_BYTES_MAX:
        raise InvalidInput(HEADER, f"is longer than {LINE_BYTES_MAX} bytes", _MEND)
    try:
        found = _DECODER.decode(value.encode("latin-1"))  # as HTTP servers decode header bytes
        if found.epoch is not None and not 0 <= found.epoch.counter < COUNTER_LIMIT:
            raise InvalidInput("counter", str(found.epoch.counter), "use 48-bit numbers")
    except InvalidInput as error:
        raise InvalidInput(f"{HEADER}.epoch", error.problem, _MEND) from error
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$").removeprefix(".")
        raise InvalidInput(f"{HEADER}.{field}" if field else HEADER, problem, _MEND) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidInput(HEADER, str(error), _MEND) from error
    return TurnLine(
        name=None if found.name is None else SessionId(found.name),
        parent=None if found.parent is None else SessionId(found.parent),
        group=found.group,
        final=found.final,
        epoch=found.epoch,
        version=found.version,
        target=found.target,
        reservation=found.reservation,
        judged=found.judged,
    )


_MEND = "leave it out: it is a gateway's, which sends one JSON object"


def received(headers: Mapping[str, str]) -> TurnLine | None:
    """The line of a request; None where no gateway stands in front. Raises as `decode`."""
    value = headers.get(HEADER)
    return None if value is None else decode(value)


def session_id_of(line: TurnLine) -> str:
    """The engine's session id of a turn with a name."""
    assert line.name is not None
    return f"{line.name}{_FINAL}" if line.final else line.name


def is_name(session_id: str) -> bool:
    """Whether it has the form of a gateway's name."""
    return _NAME.fullmatch(session_id) is not None


def read_session_id(session_id: str) -> TurnLine:
    """The name in an engine's session id, and whether it is the last turn. A client's own id, where
    no gateway stands in front, is a name as it is."""
    name = session_id.removesuffix(_FINAL)
    if name != session_id and is_name(name):
        return TurnLine(name=SessionId(name), final=True)
    return TurnLine(name=SessionId(session_id))
