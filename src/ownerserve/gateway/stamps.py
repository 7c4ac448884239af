"""This module reads and writes what heads say of a turn: the worker's word on it, the gateway's to
worker and client. Pure.

A worker that sends no line (any other engine) is served all the same; what can't be used of a line
is counted by its field, and taken as not said: a bad one may cost a cache hit, never a request.

| header | is |
|---|---|
| x-ownerserve-answer | the line: unit, load, owner, tip, mode (kv/wire/headers.py) |
| x-ownerserve-refusal | admission said no, and why |
| x-ownerserve-model | on /health: what it serves |

What came of a prompt is the worker's word where it gives one, else the counts in `usage`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import ceil

import msgspec

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.kv.ids import PrefixHash, WorkerId
from ownerserve.kv.messages import (
    Epoch,
    ExecutionMode,
    RoutingUnit,
    execution_mode,
    lost_tokens,
)
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    ENGINE_SESSION_HEADER,
    MODEL_HEADER,
    NO_TURN_LINE,
    PREFIX,
    REFUSAL_HEADER,
    TURN_HEADER,
    AnswerLine,
    AnswerRead,
    LenderAddress,
    TurnLine,
    encode_turn_line,
    read_answer_line,
    session_id_of,
)
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import WorkerLoad, are_sound
from ownerserve.router.messages import Answer, Dispatch
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import RoutedSession

ANSWER = ANSWER_HEADER.removeprefix(PREFIX).encode()
REFUSAL = REFUSAL_HEADER.removeprefix(PREFIX).encode()
MODEL = MODEL_HEADER.removeprefix(PREFIX).encode()
"""The names that ResponseHead.stamp has them under."""

_BY_STATUS = {
    429: WorkerRefusal.QUEUE_FULL,
    502: WorkerRefusal.ENGINE_DEAD,  # a proxy's word: it found no worker behind it
    503: WorkerRefusal.ENGINE_BUSY,
    529: WorkerRefusal.ENGINE_BUSY,
}


_NOT_SERVED = (ExecutionMode.REFUSED, ExecutionMode.FAILED)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """An extent is tokens [0, tokens) of the chain that ends in `prefix_hash`."""

    prefix_hash: PrefixHash
    tokens: int


class Owned(msgspec.Struct, frozen=True, gc=False):
    """An owned session has this owner, epoch and number of finished turns by the worker's word;
    `unit` is the directory's name of the owner."""

    unit: RoutingUnit
    epoch: Epoch
    version: int


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """A stamp is what an answer's head says of its worker and its turn. `unit` None: nobody can say
    of whom load and extent speak, and they are None too."""

    unit: RoutingUnit | None = None
    status: WorkerLoad | None = None
    extent: Extent | None = None
    owned: Owned | None = None
    mode: ExecutionMode | None = None
    lost_tokens: int = 0


NO_STAMP = Stamp()


class TurnRefused(msgspec.Struct, frozen=True, gc=False):
    """This is a worker's no to a turn: why, under which status, and after how many seconds it is to
    be asked again (0: not said)."""

    why: WorkerRefusal
    status: int
    retry_after_s: int


RETRY_AFTER_MAX_S = 86_400
_RETRY_AFTER = re.compile(rb"^retry-after:[ \t]*([^\r]*?)[ \t]*\r$", re.IGNORECASE | re.MULTILINE)


def retry_after_s(lines: bytes, now_unix_s: float) -> int:
    """Return the seconds that header lines ask to wait, as a number or a date; 0 when they say
    nothing that can be used."""
    said = _RETRY_AFTER.search(lines)
    if said is None:
        return 0
    text = said[1].decode("latin-1")
    if text.isascii() and text.isdigit():
        return min(int(text[:9]), RETRY_AFTER_MAX_S)
    try:
        until_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0
    return min(max(ceil(until_s - now_unix_s), 0), RETRY_AFTER_MAX_S)


def refusal_of(status: int, headers: Mapping[bytes, bytes]) -> WorkerRefusal | None:
    """Return why the worker's admission said no; None when it did not.

    Ours name the reason; of other engines the status alone says it.
    """
    if status < 400:
        return None
    told = headers.get(REFUSAL)
    if told is None:
        return _BY_STATUS.get(status)
    try:
        return WorkerRefusal(told.decode("latin-1"))
    except ValueError:
        return WorkerRefusal.OTHER


def answer_of(status: int, stamp: Stamp) -> Answer:
    """Return what the lines of an answer that is no refusal say: a turn is served, or an error
    told."""
    served = status < 400 and stamp.mode not in _NOT_SERVED
    return Answer.TURN if served else Answer.ERROR


def read_stamp(worker: WorkerId, headers: Mapping[bytes, bytes], refused: Counter[str]) -> Stamp:
    """Read the worker's line, under the gateway's name of the worker; `refused` counts the fields
    that can't be read."""
    value = headers.get(ANSWER)
    if value is None:
        return NO_STAMP
    line = _counted(read_answer_line(value), refused)
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
        refill_shares=are_sound(load.refill_shares),
        busy_share=load.busy_share,
    )


def _owned(unit: RoutingUnit, line: AnswerLine) -> Owned | None:
    """Return the owner that the line names; a worker that names itself is meant in this life."""
    owner = line.owner
    if owner is None or line.epoch is None:
        return None
    is_itself = (owner.incarnation, owner.dp_rank) == (unit.incarnation, unit.dp_rank)
    return Owned(unit if is_itself else owner, line.epoch, line.version or 0)


BLOCK_TOKENS_MAX = 528
"""A plain engine does not tell its blocks. Most of vLLM's have 16 tokens, those of hybrids with
recurrent state 528 (vLLM #40696); where they are longer, rounding may be called a loss."""


class PromptOutcome(msgspec.Struct, frozen=True, gc=False):
    """An outcome says what came of a prompt. `mode` None: nobody can say."""

    mode: ExecutionMode | None = None
    lost_tokens: int = 0


def what_came(stamp: Stamp, usage: Usage | None, last_prompt: int) -> PromptOutcome:
    """Return what came of a prompt, by the worker's word or by the counts in `usage`.

    `last_prompt` is the tokens of the session's last prompt by the gateway's own table; 0: no turn
    was counted. A worker that says its mode has compared the prompt itself. Of a plain engine the
    counts decide. The last answer does not count, because many clients leave its reasoning out:
    that it was lost is not seen. A prompt shorter than the last one is an edited history, which
    loses nothing.
    """
    if stamp.mode is not None:
        return PromptOutcome(stamp.mode, stamp.lost_tokens)
    if usage is None or not usage.tells_cached:
        return PromptOutcome()
    known, cached = last_prompt, usage.cached_tokens
    if usage.prompt_tokens < last_prompt or lost_tokens(known, cached) < _rounding(cached):
        known = min(known, cached)
    return PromptOutcome(execution_mode(known, cached, 0), lost_tokens(known, cached))


def _rounding(cached: int) -> int:
    """Return the tokens below which nothing need be lost.

    Engines keep whole blocks, and one that speculates gives up the last of them. What is cached is
    one block at least.
    """
    return 2 * min(cached or BLOCK_TOKENS_MAX, BLOCK_TOKENS_MAX)


_LINE, _ENGINE_LINE = TURN_HEADER.encode(), ENGINE_SESSION_HEADER.encode()


def turn_line_of(
    dispatch: Dispatch,
    asked: IdentifiedRequest,
    session: RoutedSession | None,
    *,
    lender: LenderAddress | None = None,
    prefiller: LenderAddress | None = None,
) -> TurnLine:
    """Make the line that tells the worker whose turn this is and for which worker.

    Another life of the worker refuses it (seed 003, v2). `session`: what is known of it, who owned
    it at which version. `lender`: who holds more of the prompt, from whom it is to be brought.
    `prefiller`: who is to compute the prompt, asked by the worker.
    """
    return TurnLine(
        name=dispatch.session,
        parent=asked.named_parent or asked.arrive.parent,
        group=None if dispatch.session is None else asked.group,
        final=asked.identity.final,
        epoch=None if session is None else session.epoch,
        version=None if session is None or session.grant is None else session.grant.version,
        target=dispatch.decision.worker.unit,
        bring_from=lender,
        decode_from=prefiller,
    )


def order_lines(line: TurnLine) -> bytes:
    """Return the header lines with the worker's orders for the turn. The name is also the engine's
    session id, in place of the client's."""
    if line == NO_TURN_LINE:
        return b""
    lines = b"%b: %b\r\n" % (_LINE, encode_turn_line(line))
    if line.name is not None:
        lines += b"%b: %b\r\n" % (_ENGINE_LINE, session_id_of(line).encode())
    return lines
