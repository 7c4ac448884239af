"""A worker's word about itself, as header lines on its answers, its refusals and its /health.

Owns the names of those headers. A worker that sends none is served all the same; a value that is
no number is taken as not sent: a bad stamp may cost a cache hit, never a request.

| header x-ownerserve- | is |
|---|---|
| incarnation, rank | which life of which data-parallel rank speaks |
| as-of, pending-prefill-tokens, running, waiting | its load, dated |
| kv-bytes-free, kv-bytes-evictable, kv-bytes-total | device memory: unused, may go, all |
| extent | PREFIX_HASH:TOKENS, what the device holds of this prompt once it is computed |
| mode, cached-tokens, prompt-tokens | what came of the prompt |
| refusal | admission said no, and why |
| epoch, version | the worker owns the turn's session: under which epoch, after how many turns |
| model | on /health: what it serves |
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ownerserve.kv.epoch import NONCE_LIMIT, ORDINAL_LIMIT, Epoch, Term
from ownerserve.kv.ids import INCARNATION_MAX, Incarnation, PrefixHash, WorkerId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.messages import Answer

PREFIX = b"x-ownerserve-"

AS_OF_MAX_S = 1e11
"""Three thousand years of seconds."""

_HASH_DIGITS = 64


_BY_STATUS = {
    429: WorkerRefusal.QUEUE_FULL,
    503: WorkerRefusal.ENGINE_BUSY,
    529: WorkerRefusal.ENGINE_BUSY,
}


_NOT_SERVED = (ExecutionMode.REFUSED.value.encode(), ExecutionMode.FAILED.value.encode())


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


def answer_of(status: int, headers: Mapping[bytes, bytes]) -> Answer:
    """What the lines of an answer that is no refusal say: a turn is served, or an error told."""
    served = status < 400 and headers.get(b"mode") not in _NOT_SERVED
    return Answer.TURN if served else Answer.ERROR


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Tokens [0, tokens) of the chain that ends in `prefix_hash`."""

    prefix_hash: PrefixHash
    tokens: int


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """What an answer's head says of its worker. `epoch`: under which it owns the turn's session;
    None: it does not, or says nothing of it."""

    unit: RoutingUnit
    status: WorkerLoad | None
    extent: Extent | None
    epoch: Epoch | None = None
    version: int = 0


def read_stamp(worker: WorkerId, headers: Mapping[bytes, bytes]) -> Stamp | None:
    """None without an incarnation that can be: then nothing can be said of whom the rest speaks."""
    incarnation = number(headers, b"incarnation")
    if incarnation is None or incarnation > INCARNATION_MAX:
        return None
    unit = RoutingUnit(worker, number(headers, b"rank") or 0, Incarnation(incarnation))
    status, extent = _status(unit, headers), _extent(headers.get(b"extent"))
    version = number(headers, b"version") or 0
    return Stamp(unit, status, extent, _epoch(headers.get(b"epoch")), version)


def number(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    """The header as a natural number."""
    value = headers.get(name)
    return int(value) if value is not None and value.isdigit() and len(value) < 20 else None


def _status(unit: RoutingUnit, headers: Mapping[bytes, bytes]) -> WorkerLoad | None:
    try:
        as_of = float(headers.get(b"as-of", b""))
    except ValueError:
        return None
    if not 0 <= as_of <= AS_OF_MAX_S:  # nan too: a stamp from no time would outlast all later ones
        return None
    pending = number(headers, b"pending-prefill-tokens")
    if pending is None:
        return None
    return WorkerLoad(
        unit=unit,
        as_of=as_of,
        pending_prefill_tokens=pending,
        running_sequences=number(headers, b"running") or 0,
        waiting_sequences=number(headers, b"waiting") or 0,
        kv_bytes_free=number(headers, b"kv-bytes-free") or 0,
        kv_bytes_total=number(headers, b"kv-bytes-total") or 0,
        kv_bytes_evictable=number(headers, b"kv-bytes-evictable") or 0,
    )


def _epoch(value: bytes | None) -> Epoch | None:
    parts = (value or b"").split(b".")
    if len(parts) != 3 or not all(part.isdigit() and len(part) < 20 for part in parts):
        return None
    ordinal, nonce, counter = map(int, parts)
    if ordinal >= ORDINAL_LIMIT or nonce >= NONCE_LIMIT:
        return None
    return Epoch(Term(ordinal, nonce), counter)


def _extent(value: bytes | None) -> Extent | None:
    digest, _, tokens = (value or b"").partition(b":")
    if len(digest) != _HASH_DIGITS or not tokens.isdigit() or len(tokens) > 12:
        return None
    try:
        return Extent(PrefixHash(bytes.fromhex(digest.decode("ascii"))), int(tokens))
    except ValueError:
        return None
