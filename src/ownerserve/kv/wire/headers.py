"""This module has every header that OwnerServe's processes read or write, and the two lines in JSON
among them.

Owns the names, and the encoding and decoding of both lines; nobody else spells one.

| header | on | says |
|---|---|---|
| x-ownerserve-session | a turn, down | the turn line: whose turn it is, and for whom |
| x-session-id | a turn, down | the engine's session id: the name, for engines without a line |
| x-ownerserve-group | a client's request | what several of its sessions share, by its own word |
| x-ownerserve-deadline-ms | a client's request | its turn may begin so long after it came |
| x-ownerserve-class | a client's request | batch: background work, which others go before |
| x-ownerserve-session-final | a client's request | the session ends with this turn |
| x-ownerserve-reservation | a request to a worker | the place that is held for it |
| x-ownerserve-answer | an answer, up | the answer line: who speaks, its load, what came |
| x-ownerserve-refusal | an answer, up | admission said no, and why (WorkerRefusal) |
| x-ownerserve-model | /health, up | what the worker serves |
| x-ownerserve-mode and others | an answer, up | what came of the turn, for people |
| x-ownerserve-worker and others | an answer, to the client | where it ran, why, what was priced |
| x-ownerserve-wait | an answer, to the client | what its turn waited for before the fleet |

**The turn line** is what a gateway sends down with each turn.

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
| bring_from | [[worker, rank, incarnation], RPC address]: who holds more of the prompt, as far |
| | as the gateway knows; the target reads that from it, where it comes in time |
| decode_from | [[worker, rank, incarnation], RPC address]: who computes the prompt for the turn; |
| | the target asks it to, and reads the state from it, where that comes in time |
| nonce | of a turn that goes to both at once, the number of its legs: who computes answers |
| | by it who reads, whichever of them is heard first |
| prefill | true: compute the prompt alone, for who asks under `nonce`; nothing is answered, and |
| | the session, which bring_from is asked by, is not bound |
| joins | the turn was moved here amid its answer, of which the client has so many tokens: it |
| | goes on behind them, by what its former worker sent; the body is empty |

vLLM hands its scheduler one free text of a request, x-session-id: `session_id_of` puts the name
there, with `;final` behind it on the last turn, and `read_session_id` takes it apart again.

Only gateways speak the line: they drop a client's own. Fields that a reader does not know are for
later versions of it, and are passed over; a known field in a wrong form is an error.

**The answer line** is what a worker sends up with each answer.

    x-ownerserve-answer: {"unit":["w0",0,17..],"load":{"as_of_s":1.5,..},"mode":"seed",..}

| field | is |
|---|---|
| unit | [worker, rank, incarnation]: who speaks, by its own name |
| load | its load, dated, in the words of kv/wire/status.py |
| owner | who owns the turn's session, as far as was heard: itself, or whose guest the turn is |
| epoch | [[ordinal, nonce], counter]: under which the owner does |
| version | turns that the session's owners finished; the owner alone says it |
| tip, tokens | prefix hash, 64 hex: the device holds [0, tokens) of the prompt once computed |
| mode, lost_tokens | what came of the prompt (kv/messages.py) |

Read field by field: one in a wrong form counts as not said and is named, the others stand. Fields
that a reader does not know are for later versions of it, and are passed over. Only gateways read
the line, and they pass it on to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.ids import INCARNATION_MAX, SessionId
from ownerserve.kv.messages import COUNTER_LIMIT, Epoch, ExecutionMode, RoutingUnit
from ownerserve.kv.wire.status import COUNT_MAX, Count, LoadStatement

PREFIX = "x-ownerserve-"
TURN_HEADER = "x-ownerserve-session"
ENGINE_SESSION_HEADER = "x-session-id"
"""Where vLLM reads the session of a request."""
GROUP_HEADER = "x-ownerserve-group"
"""A client's word for what several of its sessions share: a repository's or document's id."""
DEADLINE_HEADER = "x-ownerserve-deadline-ms"
CLASS_HEADER = "x-ownerserve-class"
FINAL_HEADER = "x-ownerserve-session-final"
RESERVATION_HEADER = "x-ownerserve-reservation"

ANSWER_HEADER = "x-ownerserve-answer"
REFUSAL_HEADER = "x-ownerserve-refusal"
MODEL_HEADER = "x-ownerserve-model"
MODE_HEADER = "x-ownerserve-mode"
CACHED_TOKENS_HEADER = "x-ownerserve-cached-tokens"
PROMPT_TOKENS_HEADER = "x-ownerserve-prompt-tokens"
LOST_TOKENS_HEADER = "x-ownerserve-lost-tokens"
RESTORE_HEADER = "x-ownerserve-restore"
BROUGHT_HEADER = "x-ownerserve-brought-tokens"
PLAN_HEADER = "x-ownerserve-plan"
EPOCH_HEADER = "x-ownerserve-epoch"
VERSION_HEADER = "x-ownerserve-version"

WORKER_HEADER = "x-ownerserve-worker"
REASON_HEADER = "x-ownerserve-reason"
ACTION_HEADER = "x-ownerserve-action"
TURN_CLASS_HEADER = "x-ownerserve-turn"
EXPECTED_CACHED_HEADER = "x-ownerserve-expected-cached-tokens"
PRICED_HEADER = "x-ownerserve-priced"
WAIT_HEADER = "x-ownerserve-wait"

LINE_BYTES_MAX = 4096
ADDRESS_MAX = 256
NONCE_MAX = (1 << 63) - 1
_encoder = msgspec.json.Encoder()
_BROUGHT = re.compile(r"([a-z_]{1,32})=([0-9]{1,12})")


def header_line(name: str, value: str) -> bytes:
    """Return one whole header line, with its line end."""
    return f"{name}: {value}\r\n".encode()


def brought_text(tokens: Mapping[str, int]) -> str:
    """Return the value of x-ownerserve-brought-tokens: "host=512, peer=96"."""
    return ", ".join(f"{source}={count}" for source, count in tokens.items())


def read_brought(text: str) -> dict[str, int]:
    """Return what that value says; a part of it in another form is left out."""
    parts = (_BROUGHT.fullmatch(part.strip()) for part in text.split(","))
    return {part[1]: int(part[2]) for part in parts if part is not None}


# The turn line

NAME_DIGITS = 32

_FINAL = ";final"
_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
_Name = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{NAME_DIGITS}}}\Z")]


class LenderAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A lender's address says which unit has or computes state that another may read, and where
    its node's RPC port is."""

    unit: RoutingUnit
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_MAX)]


class TurnLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """A turn's line is what a worker is told of a turn beside its body."""

    name: SessionId | None = None
    parent: SessionId | None = None
    group: str | None = None
    final: bool = False
    epoch: Epoch | None = None
    version: int | None = None
    target: RoutingUnit | None = None
    reservation: int | None = None
    judged: bool = False
    bring_from: LenderAddress | None = None
    decode_from: LenderAddress | None = None
    nonce: int | None = None
    prefill: bool = False
    joins: int | None = None


class _CheckedTurnLine(msgspec.Struct, frozen=True, gc=False):
    """This struct states the form that a received turn line must have."""

    name: _Name | None = None
    parent: _Name | None = None
    group: _Name | None = None
    final: bool = False
    epoch: Epoch | None = None
    version: Count | None = None
    target: RoutingUnit | None = None
    reservation: Annotated[int, msgspec.Meta(ge=0)] | None = None
    judged: bool = False
    bring_from: LenderAddress | None = None
    decode_from: LenderAddress | None = None
    nonce: Annotated[int, msgspec.Meta(gt=0, le=NONCE_MAX)] | None = None
    prefill: bool = False
    joins: Count | None = None


NO_TURN_LINE = TurnLine()

_turn_line_decoder = msgspec.json.Decoder(_CheckedTurnLine)


def encode_turn_line(line: TurnLine) -> bytes:
    """Return the value of the header that carries `line`."""
    return _encoder.encode(line)


def decode_turn_line(value: str) -> TurnLine:
    """Return the line in a header's value. Raises InvalidInput that names the field."""
    if len(value) > LINE_BYTES_MAX:
        raise InvalidInput(TURN_HEADER, f"is longer than {LINE_BYTES_MAX} bytes", _MEND)
    try:
        found = _turn_line_decoder.decode(
            value.encode("latin-1")
        )  # as HTTP servers decode header bytes
        if found.epoch is not None and not 0 <= found.epoch.counter < COUNTER_LIMIT:
            raise InvalidInput("counter", str(found.epoch.counter), "use 48-bit numbers")
    except InvalidInput as error:
        raise InvalidInput(f"{TURN_HEADER}.epoch", error.problem, _MEND) from error
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$").removeprefix(".")
        raise InvalidInput(
            f"{TURN_HEADER}.{field}" if field else TURN_HEADER, problem, _MEND
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidInput(TURN_HEADER, str(error), _MEND) from error
    if found.prefill and found.nonce is None:
        raise InvalidInput(f"{TURN_HEADER}.nonce", "is missing beside prefill", _MEND)
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
        bring_from=found.bring_from,
        decode_from=found.decode_from,
        nonce=found.nonce,
        prefill=found.prefill,
        joins=found.joins,
    )


_MEND = "leave it out: it is a gateway's, which sends one JSON object"


def received_turn_line(headers: Mapping[str, str]) -> TurnLine | None:
    """Return the line of a request; None where no gateway stands in front. Raises InvalidInput."""
    value = headers.get(TURN_HEADER)
    return None if value is None else decode_turn_line(value)


def session_id_of(line: TurnLine) -> str:
    """Return the engine's session id of a turn with a name."""
    assert line.name is not None
    return f"{line.name}{_FINAL}" if line.final else line.name


def is_name(session_id: str) -> bool:
    """Tell whether `session_id` has the form of a gateway's name."""
    return _NAME.fullmatch(session_id) is not None


def read_session_id(session_id: str) -> TurnLine:
    """Return the name in an engine's session id, and whether it is the last turn. A client's own
    id, where no gateway stands in front, is a name as it is.
    """
    name = session_id.removesuffix(_FINAL)
    if name != session_id and is_name(name):
        return TurnLine(name=SessionId(name), final=True)
    return TurnLine(name=SessionId(session_id))


# The end of a leg

_MOVED = re.compile(rb": moved ([0-9]{1,9})\n\n")


def moved_comment(tokens: int) -> bytes:
    """Return the last event of a stream that goes on at another worker, behind so many tokens of
    its answer: a comment, which is nobody's event."""
    return b": moved %d\n\n" % tokens


def read_moved_comment(event: bytes) -> int | None:
    """Return how many tokens of an answer a stream had that goes on elsewhere; None: the event says
    nothing of it."""
    found = _MOVED.fullmatch(event)
    return None if found is None else int(found[1])


# The answer line

_Tip = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class AnswerLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """An answer's line is what a worker says beside its answer."""

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
    """An answer's line as it was read comes with the names of the fields that were refused ("line":
    all of it).
    """

    line: AnswerLine
    refused: tuple[str, ...] = ()


NO_ANSWER_LINE = AnswerLine()

_answer_line_decoder = msgspec.json.Decoder(AnswerLine)
_FIELDS = {field.name: field.type for field in msgspec.structs.fields(AnswerLine)}


def encode_answer_line(line: AnswerLine) -> bytes:
    """Return the value of the header that carries `line`."""
    return _encoder.encode(line)


def read_answer_line(value: bytes) -> AnswerRead:
    """Return the line in a header's value. Never raises: what is refused is named."""
    if len(value) > LINE_BYTES_MAX:
        return AnswerRead(NO_ANSWER_LINE, ("line",))
    try:
        line = _answer_line_decoder.decode(value)
    except (msgspec.ValidationError, InvalidInput):
        return _by_field(value)
    except UNREADABLE:
        return AnswerRead(NO_ANSWER_LINE, ("line",))
    unit, owner, epoch = line.unit, line.owner, line.epoch
    is_sound = (
        (unit is None or _is_unit(unit))
        and (owner is None or _is_unit(owner))
        and (epoch is None or _is_epoch(epoch))
    )
    return AnswerRead(line) if is_sound else _by_field(value)


def _by_field(value: bytes) -> AnswerRead:
    """Return what can be used of a line of which something is wrong."""
    try:
        found = msgspec.json.decode(value)
    except UNREADABLE:
        return AnswerRead(NO_ANSWER_LINE, ("line",))
    if not isinstance(found, dict):
        return AnswerRead(NO_ANSWER_LINE, ("line",))
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
    """Tell whether the field's numbers are such as there are."""
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
