"""A worker's word about itself and its turn, as the gateway takes it: from its answer's head.

A worker that sends no line (any other engine) is served all the same; what can't be used of a line
is counted by its field, and taken as not said: a bad one may cost a cache hit, never a request.

| header | is |
|---|---|
| x-ownerserve-answer | the line: unit, load, owner, tip, mode (kv/wire/answer_line.py) |
| x-ownerserve-refusal | admission said no, and why |
| x-ownerserve-model | on /health: what it serves |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ownerserve.gateway.http.heads import PREFIX
from ownerserve.kv.epoch import Epoch
from ownerserve.kv.ids import PrefixHash, WorkerId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit
from ownerserve.kv.wire import answer_line
from ownerserve.kv.wire.answer_line import AnswerLine, AnswerRead
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.messages import Answer

ANSWER = answer_line.HEADER.encode().removeprefix(PREFIX)

_BY_STATUS = {
    429: WorkerRefusal.QUEUE_FULL,
    503: WorkerRefusal.ENGINE_BUSY,
    529: WorkerRefusal.ENGINE_BUSY,
}


_NOT_SERVED = (ExecutionMode.REFUSED, ExecutionMode.FAILED)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Tokens [0, tokens) of the chain that ends in `prefix_hash`."""

    prefix_hash: PrefixHash
    tokens: int


class Owned(msgspec.Struct, frozen=True, gc=False):
    """Who owns the turn's session under which epoch, after how many turns; `unit` is the
    directory's name of it."""

    unit: RoutingUnit
    epoch: Epoch
    version: int


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """What an answer's head says of its worker and its turn. `unit` None: nobody can say of whom
    load and extent speak, and they are None too."""

    unit: RoutingUnit | None = None
    status: WorkerLoad | None = None
    extent: Extent | None = None
    owned: Owned | None = None
    mode: ExecutionMode | None = None
    lost_tokens: int = 0


NOTHING = Stamp()


def refusal_of(status: int, headers: Mapping[bytes, bytes]) -> WorkerRefusal | None:
    """Why the worker's admission said no; None when it did not.

    Ours name the reason; of other engines the status alone says it.
    """
    if status < 400:
        return None
    told = headers.get(b"refusal")
    if told is None:
        return _BY_STATUS.get(status)
    try:
        return WorkerRefusal(told.decode("latin-1"))
    except ValueError:
        return WorkerRefusal.OTHER


def answer_of(status: int, stamp: Stamp) -> Answer:
    """What the lines of an answer that is no refusal say: a turn is served, or an error told."""
    served = status < 400 and stamp.mode not in _NOT_SERVED
    return Answer.TURN if served else Answer.ERROR


def read_stamp(worker: WorkerId, headers: Mapping[bytes, bytes], refused: Counter[str]) -> Stamp:
    """The worker's line, by the gateway's name of it; `refused` counts the fields that can't be."""
    value = headers.get(ANSWER)
    if value is None:
        return NOTHING
    line = _counted(answer_line.read(value), refused)
    stamp = Stamp(mode=line.mode, lost_tokens=line.lost_tokens)
    if line.unit is None:
        return stamp
    unit = RoutingUnit(worker, line.unit.dp_rank, line.unit.incarnation)
    return Stamp(
        unit=unit,
        status=_status(unit, line),
        extent=Extent(PrefixHash(bytes.fromhex(line.tip)), line.tokens) if line.tip else None,
        owned=_owned(unit, line),
        mode=line.mode,
        lost_tokens=line.lost_tokens,
    )


def _counted(read: AnswerRead, refused: Counter[str]) -> AnswerLine:
    refused.update(read.refused)
    return read.line


def _status(unit: RoutingUnit, line: AnswerLine) -> WorkerLoad | None:
    load = line.load
    if load is None:
        return None
    return WorkerLoad(
        unit=unit,
        as_of=load.as_of_s,
        pending_prefill_tokens=load.pending_prefill_tokens,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        kv_bytes_free=load.kv_bytes_free,
        kv_bytes_total=load.kv_bytes_total,
        kv_bytes_evictable=load.kv_bytes_evictable,
    )


def _owned(unit: RoutingUnit, line: AnswerLine) -> Owned | None:
    """A worker that names itself is meant in this life."""
    owner = line.owner
    if owner is None or line.epoch is None:
        return None
    is_itself = (owner.incarnation, owner.dp_rank) == (unit.incarnation, unit.dp_rank)
    return Owned(unit if is_itself else owner, line.epoch, line.version or 0)
