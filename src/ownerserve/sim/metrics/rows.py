"""The rows hold one finished turn each, packed: every formula of docs/metrics.md is computed from
them.

Owns the columns. Must never aggregate while the run goes on (summary.py does, at its end) and never
read a clock. A row is fixed in size, so a million turns are one buffer and one numpy view.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.messages import ExecutionMode, PlacementAction, UnservedReason

MODES = tuple(ExecutionMode)
ACTIONS = (None, *PlacementAction)
REASONS = (None, *UnservedReason)

NO_WORKER = -1


class TurnRow(msgspec.Struct, gc=False):
    """A turn that ended: served, refused or failed. The fleet keeps one per live turn, fills it as
    the turn goes on, and gives it to `Rows.add` at the end. Times are seconds of the heap's clock;
    tokens are the trace's (never units); bytes are real bytes.

    Who and where: `number`, `session` (of the workload; a sub-agent has its session's), `position`
    as in `Turn`. `worker`: who decoded, NO_WORKER when refused. `prefill_worker`: who computed the
    prompt when that was another one. `owner`: the worker whose device held the session's state when
    the turn arrived, NO_WORKER when none did (a first turn, a lost owner).
    `owner_wait_ms`: what others' pending prefill would have made the turn wait at `owner` then
    (`router.pricing.wait_ms`); at `worker`, when there was no owner.
    `attempts`: dispatches of the client's last try, 1 when nothing was retried; `client_retries`:
    how often it asked again after it was refused or had hung up. `preemptions`: times it was thrown
    out.

    When: `arrived_s` released; `routed_s` the dispatch that ended it; `started_s` admitted by the
    engine's scheduler (restore done); `first_token_s`; `done_s`. For a turn that never got as far
    a time is the next one known before it, so that they never decrease. `restore_queue_ms`,
    `restore_load_ms`, `restore_recompute_ms`: of bringing state back, zero when nothing was.

    What: `cached_tokens` of the prompt were not computed (found on the device + `restored_tokens`
    loaded from tiers or peers); `computed_tokens` prompt tokens were (replays and what a preemption
    made the engine compute again included, so cached + computed may exceed the prompt).
    `wanted_tokens` is the trace's answer, `output_tokens` what was sampled: fewer = truncated.

    Bytes: `placed_bytes` of state that the turn newly took on the device(s); `duplicate_bytes` of
    these lay on another worker's device too, and still did when the turn ended; `avoidable_bytes`
    of these: the session's owner had at arrival a wait <= T_hot, so that staying was open.
    `network_bytes` of KV that crossed between workers (prefill to decode, fetch, migration).
    """

    number: int
    session: int
    position: int
    arrived_s: float
    prompt_tokens: int
    wanted_tokens: int
    worker: int = NO_WORKER
    prefill_worker: int = NO_WORKER
    owner: int = NO_WORKER
    owner_wait_ms: float = 0.0
    attempts: int = 1
    client_retries: int = 0
    preemptions: int = 0
    routed_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    done_s: float = 0.0
    restore_queue_ms: float = 0.0
    restore_load_ms: float = 0.0
    restore_recompute_ms: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    placed_bytes: int = 0
    duplicate_bytes: int = 0
    avoidable_bytes: int = 0
    network_bytes: int = 0
    mode: ExecutionMode = ExecutionMode.COLD_PREFILL
    action: PlacementAction | None = None
    reason: UnservedReason | None = None


_LONG = {"placed_bytes", "duplicate_bytes", "avoidable_bytes", "network_bytes"}
_ENUMS = {"mode", "action", "reason"}


def _code(field: msgspec.structs.FieldInfo) -> str:
    """Return a column's width: times are 64-bit floats, bytes take 64 bits, counts and indices 32,
    enums 8."""
    if field.name in _ENUMS:
        return "b"
    if field.type is float:
        return "d"
    return "q" if field.name in _LONG else "i"


_CODES = {field.name: _code(field) for field in msgspec.structs.fields(TurnRow)}
DTYPE = np.dtype([(name, f"<{code}") for name, code in _CODES.items()])
_PACK = struct.Struct("<" + "".join(_CODES.values())).pack
_MODE_AT = {mode: index for index, mode in enumerate(MODES)}
_ACTION_AT = {action: index for index, action in enumerate(ACTIONS)}
_REASON_AT = {reason: index for index, reason in enumerate(REASONS)}
SERVED = tuple(
    index
    for index, mode in enumerate(MODES)
    if mode not in (ExecutionMode.REFUSED, ExecutionMode.FAILED)
)


class Rows:
    """The rows are all finished turns, in the order in which they ended."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data) // DTYPE.itemsize

    def add(self, row: TurnRow) -> None:
        """Keep what `row` says now; the caller may use the object again."""
        values = msgspec.structs.astuple(row)
        self._data += _PACK(
            *values[:-3], _MODE_AT[row.mode], _ACTION_AT[row.action], _REASON_AT[row.reason]
        )

    def table(self) -> NDArray[Any]:
        """Return the rows as a structured array, a copy: `table["arrived_s"]` is a column."""
        return np.frombuffer(self._data, DTYPE).copy()
