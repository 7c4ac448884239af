"""A worker says of itself on `GET /ownerserve/status` who it is, its load, and what it can do.

Owns the record, its JSON and its reader. Version 1; a field that this build does not know is
ignored and one that an older build does not send has a default, so that N reads N - 1.

| part | says |
|---|---|
| unit | worker id, data-parallel rank, incarnation |
| load | what waits and runs, bytes of device memory for state that are free, evictable, in all; |
| | what refilling the device costs, and how busy the engine is |
| profile | models, role, actions, KV bytes, measured speed, tiers, RPC address |

A number that is no number, negative or absurd is refused by its field's name: the field counts as
not said, the rest of the record stands, and the reader's `problems` name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from typing import Annotated

import msgspec

from ownerserve.kv.addresses import parse_endpoint
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.ids import INCARNATION_MAX, Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit

VERSION = 1
OLDEST = 1

COUNT_MAX = 1 << 53
"""Tokens, sequences and bytes above this are a fault and no machine."""
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
AS_OF_MAX_S = 1e11
"""Three thousand years of seconds: a load from no time would outlast all later ones."""
MS_MAX = 1e9
"""No pass, step or latency takes eleven days."""
RATE_MAX = 1e12
"""Bytes a millisecond: a petabyte a second."""
BYTES_LEAST = 1.0
"""Bytes a token, a sequence or a millisecond: what is not 0 is not less than this either."""
TEXT_MAX = 512
NAMES_MAX = 1024
"""Models, actions or tiers in one record."""

ROLES = ("hybrid", "prefill", "decode")
"""What a worker takes of turns: all, prompts for others, turns whose prompts others may compute."""

REFILL_SHARE_MAX = 1000.0
"""Refilling would take a thousand times as long as what is there lasts: there is no room."""
REFILL_SHARES_MAX = 16
"""Sizes in one record."""


class RefillShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A refill share is what part of a worker's time goes into bringing back what it displaces, if
    it takes `tokens` more: the ms to bring back all state on the device by its real way back, over
    the idle age, in ms, of what would go next. Free room and state that nobody will come back for
    count as nothing, so 0 where the tokens fit there. It exceeds 1 where the device can't keep up.
    """

    tokens: Count
    share: Annotated[float, msgspec.Meta(ge=0, le=REFILL_SHARE_MAX)]


def refill_share_at(shares: Sequence[RefillShare], tokens: float) -> float | None:
    """Return the refill share for so many tokens, beyond the stated sizes that of the last one;
    None where none is stated. Between two sizes the idle age falls on a line, not its inverse;
    where the smaller one has room for nothing to be displaced, the share rises on one.
    """
    if not shares:
        return None
    if tokens <= shares[0].tokens:
        return shares[0].share
    for low, high in pairwise(shares):
        if tokens <= high.tokens:
            part = (tokens - low.tokens) / (high.tokens - low.tokens)
            if not low.share or not high.share:
                return low.share + part * (high.share - low.share)
            return 1.0 / ((1.0 - part) / low.share + part / high.share)
    return shares[-1].share


BusyShare = Annotated[float, msgspec.Meta(ge=0, le=1)]


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """A worker's load as it stamps it on every answer; `as_of` is on the worker's own clock.

    Of the device memory for state, `kv_bytes_free` is unused now, `kv_bytes_evictable` holds state
    that nobody uses and a new turn may displace; the rest of `kv_bytes_total` is in use.
    `refill_shares` ascend by tokens; none: the worker can't tell. `busy_share` is the part of the
    last minute in which its engine computed, as an exponential mean; None: it can't tell.
    """

    unit: RoutingUnit
    as_of: float
    pending_prefill_tokens: int
    running_sequences: int
    waiting_sequences: int
    kv_bytes_free: int
    kv_bytes_total: int
    kv_bytes_evictable: int = 0
    refill_shares: tuple[RefillShare, ...] = ()
    busy_share: float | None = None


class UnitStatement(msgspec.Struct, frozen=True):
    """A unit's statement names the unit that speaks; `worker` is what the worker calls itself."""

    worker: str = ""
    rank: int = 0
    incarnation: int = 0


class LoadStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A load's statement is a WorkerLoad without its unit, in the words of the record."""

    as_of_s: Annotated[float, msgspec.Meta(ge=0, le=AS_OF_MAX_S)] = 0.0
    pending_prefill_tokens: Count = 0
    running_sequences: Count = 0
    waiting_sequences: Count = 0
    kv_bytes_free: Count = 0
    kv_bytes_evictable: Count = 0
    kv_bytes_total: Count = 0
    refill_shares: tuple[RefillShare, ...] = ()
    busy_share: BusyShare | None = None


class SpeedStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A speed statement tells what computing takes on the worker.

    A prefill of n tokens after p others takes `prefill_pass_ms` + n x (`prefill_token_ms` +
    `prefill_attention_ms` x (p + n / 2)); a decode step `step_ms` + `step_ms_per_sequence` x batch.
    `*_measured_s`: when that was last measured (seconds since 1970); None: assumed, not measured.
    `replay_tokens` are computed again after state came from anywhere but the device.
    """

    prefill_pass_ms: float
    prefill_token_ms: float
    prefill_attention_ms: float
    step_ms: float
    step_ms_per_sequence: float
    replay_tokens: int = 0
    prefill_measured_s: float | None = None
    step_measured_s: float | None = None


class TierStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A tier's statement describes one place below the device that the worker keeps state in:
    `host`, `disk` or `remote`.

    `bytes_total` None: not known. Loading n bytes takes `latency_ms` + n / `bytes_per_ms`, as last
    measured at `measured_s` (None: assumed).
    """

    name: str
    bytes_total: int | None = None
    latency_ms: float
    bytes_per_ms: float
    measured_s: float | None = None


class ProfileStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A profile says what a worker is and can do; constant but for `speed` and `tiers`, which it
    measures.

    `models`: the names it serves, the first its own. `actions`: the placement actions that it can
    carry out as the worker that runs the turn. `kv_bytes_per_token` and `kv_bytes_per_sequence`:
    device memory that each token of a sequence takes, and what a sequence takes beside.
    `sequence_tokens`: the longest sequence it takes; 0: not said. `owns_sessions`: it says
    to a directory what it owns. `lends`: the tiers from which other workers read its state; None:
    not said. `leaving`: it ends soon, and wants no new turn; until then its state can be read.
    `frees_prompts`: what it computed for another worker it frees once that one has it.
    """

    models: tuple[str, ...] = ()
    role: str = "hybrid"
    actions: tuple[str, ...] | None = None
    spec_digest: str = ""
    kv_bytes_per_token: float = 0.0
    kv_bytes_per_sequence: float = 0.0
    speed: SpeedStatement | None = None
    tiers: tuple[TierStatement, ...] = ()
    rpc: str | None = None
    sequence_tokens: int = 0
    owns_sessions: bool = False
    lends: tuple[str, ...] | None = None
    leaving: bool = False
    frees_prompts: bool = False


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's status is the record that it answers with. Who answers may add fields of its own;
    readers ignore them.
    """

    version: int = VERSION
    unit: UnitStatement
    load: LoadStatement
    profile: ProfileStatement


class StatusRead(msgspec.Struct, frozen=True):
    """A record as it was read has `status` None when nothing of it can be used, and in `problems`
    each thing that was refused, by the name of its field.
    """

    status: WorkerStatus | None
    problems: tuple[str, ...] = ()


def load_statement(load: WorkerLoad) -> LoadStatement:
    """Return `load` as the record says it."""
    return LoadStatement(
        as_of_s=load.as_of,
        pending_prefill_tokens=load.pending_prefill_tokens,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        kv_bytes_free=load.kv_bytes_free,
        kv_bytes_evictable=load.kv_bytes_evictable,
        kv_bytes_total=load.kv_bytes_total,
        refill_shares=load.refill_shares,
        busy_share=load.busy_share,
    )


def unit_statement(unit: RoutingUnit) -> UnitStatement:
    """Return `unit` as the record says it."""
    return UnitStatement(unit.worker, unit.dp_rank, unit.incarnation)


def load_of(unit: UnitStatement, load: LoadStatement, *, worker: WorkerId) -> WorkerLoad:
    """Return what `unit`, which its reader calls `worker`, says of its load."""
    return WorkerLoad(
        unit=RoutingUnit(worker, unit.rank, Incarnation(unit.incarnation)),
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


def are_sound(shares: tuple[RefillShare, ...]) -> tuple[RefillShare, ...]:
    """Return the refill shares if they ascend by tokens and are not too many; else none."""
    ascend = all(low.tokens < high.tokens for low, high in pairwise(shares))
    return shares if ascend and len(shares) <= REFILL_SHARES_MAX else ()


def read_status(document: bytes) -> StatusRead:
    """Return the record in `document`. Never raises: what is wrong is named in `problems`."""
    try:
        found = msgspec.json.decode(document)
    except UNREADABLE as error:
        return StatusRead(None, (f"document: {error}",))
    if not isinstance(found, dict):
        return StatusRead(None, ("document: is no JSON object",))
    fields = _Fields(found, "", [])
    version = fields.count("version", default=0)
    if version < OLDEST:  # a later one has fields that are ignored, and keeps these
        return StatusRead(None, (f"version: {found.get('version')!r}; speak {OLDEST} or later",))
    status = WorkerStatus(
        version=version,
        unit=_unit(fields.part("unit")),
        load=_load(fields.part("load")),
        profile=_profile(fields.part("profile")),
    )
    return StatusRead(status, tuple(fields.problems))


# ---- reading, field by field


class _Fields:
    """Fields reads one object of the record. What is refused goes into `problems`, which all parts
    share.
    """

    def __init__(self, found: Mapping[str, object], path: str, problems: list[str]) -> None:
        self.problems = problems
        self._found = found
        self._path = path

    def number(self, name: str, *, default: float, most: float, least: float = 0.0) -> float:
        """Return a number that is 0 or from `least` to `most`; `default` when it is missing or
        refused.
        """
        value = self._found.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._refuse(name, value, default)
        if not isfinite(value) or not (value == 0 or least <= value <= most):
            return self._refuse(name, value, default)
        return float(value)

    def bytes_per(self, name: str) -> float:
        """Return the bytes for one of something; 0 when missing or refused."""
        return self.number(name, default=0.0, most=float(COUNT_MAX), least=BYTES_LEAST)

    def count(self, name: str, *, default: int = 0, most: int = COUNT_MAX) -> int:
        """Return a whole number from 0 to `most`; `default` when it is missing or refused."""
        value = self._found.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            return int(self._refuse(name, value, default))
        return value

    def is_true(self, name: str) -> bool:
        """Tell whether the field says so; anything but true and false is refused and counts as
        false.
        """
        value = self._found.get(name)
        if value is not None and not isinstance(value, bool):
            self._refuse(name, value, 0.0)
        return value is True

    def date(self, name: str) -> float | None:
        """Return seconds since 1970; None when missing, 0 or refused."""
        if self._found.get(name) is None:
            return None
        return self.number(name, default=0.0, most=float(COUNT_MAX)) or None

    def share(self, name: str) -> float | None:
        """Return a part of 1; None when missing or refused."""
        value = self.number(name, default=-1.0, most=1.0)
        return None if value < 0.0 else value

    def refill_shares(self, name: str) -> tuple[RefillShare, ...]:
        """Return pairs of tokens and share, ascending; none when missing or refused."""
        value = self._found.get(name)
        if value is None:
            return ()
        try:
            said = msgspec.convert(value, tuple[RefillShare, ...])
        except UNREADABLE:
            said = ()
        if value != [] and not are_sound(said):
            self._refuse(name, value, 0.0)
            return ()
        return said

    def text(self, name: str, *, default: str = "") -> str:
        value = self._found.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > TEXT_MAX:
            self._refuse(name, value, 0.0)
            return default
        return value

    def rpc_address(self, name: str) -> str | None:
        """Return an address tcp://HOST:PORT or curve://HOST:PORT, or None; all else is refused."""
        value = self._found.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, str):
            with suppress(InvalidInput):
                parse_endpoint(value, field=name, mend="")
                return value
        self._refuse(name, value, 0.0)
        return None

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of texts; None when it is not said."""
        value = self._found.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > NAMES_MAX:
            self._refuse(name, value, 0.0)
            return None
        good = [one for one in value if isinstance(one, str) and len(one) <= TEXT_MAX]
        if len(good) < len(value):
            self._refuse(name, value, 0.0)
        return tuple(good)

    def part(self, name: str) -> _Fields:
        """Return an object inside this one; an empty one where it is missing."""
        value = self._found.get(name)
        if value is not None and not isinstance(value, dict):
            self._refuse(name, value, 0.0)
        return _Fields(_object(value), self._name(name), self.problems)

    def parts(self, name: str) -> Sequence[_Fields]:
        """Return a list of objects inside this one."""
        value = self._found.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > NAMES_MAX:
            self._refuse(name, value, 0.0)
            return ()
        return [
            _Fields(_object(one), f"{self._name(name)}[{at}]", self.problems)
            for at, one in enumerate(value)
        ]

    def __contains__(self, name: str) -> bool:
        return self._found.get(name) is not None

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _refuse(self, name: str, value: object, default: float) -> float:
        shown = repr(value)
        self.problems.append(f"{self._name(name)}: {shown[:80]}")
        return default


def _object(value: object) -> Mapping[str, object]:
    """Return `value` where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _unit(fields: _Fields) -> UnitStatement:
    return UnitStatement(
        fields.text("worker"),
        fields.count("rank", most=1 << 20),
        fields.count("incarnation", most=INCARNATION_MAX),
    )


def _load(fields: _Fields) -> LoadStatement:
    total = fields.count("kv_bytes_total")
    return LoadStatement(
        as_of_s=fields.number("as_of_s", default=0.0, most=float(COUNT_MAX)),
        pending_prefill_tokens=fields.count("pending_prefill_tokens"),
        running_sequences=fields.count("running_sequences"),
        waiting_sequences=fields.count("waiting_sequences"),
        kv_bytes_free=fields.count("kv_bytes_free"),
        kv_bytes_evictable=fields.count("kv_bytes_evictable"),
        kv_bytes_total=total,
        refill_shares=fields.refill_shares("refill_shares"),
        busy_share=fields.share("busy_share"),
    )


def _profile(fields: _Fields) -> ProfileStatement:
    return ProfileStatement(
        models=fields.texts("models") or (),
        role=fields.text("role", default="hybrid"),
        actions=fields.texts("actions"),
        spec_digest=fields.text("spec_digest"),
        kv_bytes_per_token=fields.bytes_per("kv_bytes_per_token"),
        kv_bytes_per_sequence=fields.bytes_per("kv_bytes_per_sequence"),
        speed=_speed(fields.part("speed")) if "speed" in fields else None,
        tiers=tuple(tier for part in fields.parts("tiers") if (tier := _tier(part)) is not None),
        rpc=fields.rpc_address("rpc"),
        sequence_tokens=fields.count("sequence_tokens"),
        owns_sessions=fields.is_true("owns_sessions"),
        lends=fields.texts("lends"),
        leaving=fields.is_true("leaving"),
        frees_prompts=fields.is_true("frees_prompts"),
    )


def _speed(fields: _Fields) -> SpeedStatement | None:
    """Read the speed; None when one of its times is missing or was refused: half a price is
    none.
    """
    refused = len(fields.problems)
    times = {name: fields.number(name, default=-1.0, most=MS_MAX) for name in _TIMES}
    missing = [name for name, ms in times.items() if ms < 0.0]
    if missing:
        if len(fields.problems) == refused:
            fields.problems.append(f"profile.speed: lacks {', '.join(missing)}")
        return None
    if times["prefill_token_ms"] + times["prefill_pass_ms"] <= 0.0:
        fields.problems.append("profile.speed: a prefill would take no time")
        return None
    return SpeedStatement(
        **times,
        replay_tokens=fields.count("replay_tokens"),
        prefill_measured_s=fields.date("prefill_measured_s"),
        step_measured_s=fields.date("step_measured_s"),
    )


_TIMES = (
    "prefill_pass_ms",
    "prefill_token_ms",
    "prefill_attention_ms",
    "step_ms",
    "step_ms_per_sequence",
)


def _tier(fields: _Fields) -> TierStatement | None:
    name = fields.text("name")
    latency_ms = fields.number("latency_ms", default=-1.0, most=MS_MAX)
    rate = fields.number("bytes_per_ms", default=0.0, most=RATE_MAX, least=BYTES_LEAST)
    if not name or latency_ms < 0.0 or rate <= 0.0:
        fields.problems.append(f"profile.tiers: {name or 'a tier'} has no name, latency or rate")
        return None
    return TierStatement(
        name=name,
        bytes_total=fields.count("bytes_total") if "bytes_total" in fields else None,
        latency_ms=latency_ms,
        bytes_per_ms=rate,
        measured_s=fields.date("measured_s"),
    )
