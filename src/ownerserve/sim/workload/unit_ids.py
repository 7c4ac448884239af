"""This module gives the ids of a run's units: 32 bits each, no id for two different prefixes.

Owns the id space and its layout. Everything is fixed before the run: what a turn's ids are depends
on the trace and the shape, never on the order in which turns complete.

    0          shared                    bases[0]            bases[1]            ... limit
    |  heads,  or ids of the trace (x copies) | session 0         | session 1         |
                                              | recorded | fresh  | recorded | fresh  |

*recorded*: ids local to a session, moved. *fresh*: units that no prompt of the trace shows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.timeline.turns import UNIT_BYTES
from ownerserve.sim.workload.cast import PlayedSession
from ownerserve.sim.workload.shape import WorkloadShape
from ownerserve.trace.model import Run, Runs, Trace, TraceRequest, TraceSession
from ownerserve.trace.runs import (
    IntervalSet,
    blocks,
    common_prefix,
    covered_at_least,
    take,
)

LIMIT = 1 << (8 * UNIT_BYTES)
_UNIT = np.dtype("<u4")
TABLE_IDS = 1 << 22
"""16 MB: the Claude-Code trace whole, the Mooncake traces many times."""
Triple = tuple[int, int, str]


class UnitIdTable:
    """The table holds the first `ids` ids as little-endian uint32, up to TABLE_IDS of them.

    Most runs' ids are cut from it at 0.2 us a run of them, others are made at 1 us.
    """

    __slots__ = ("_ids", "_packed")

    def __init__(self, ids: int) -> None:
        self._ids = min(ids, TABLE_IDS)
        self._packed = np.arange(self._ids, dtype=_UNIT).tobytes()

    def pack(self, runs: Runs, offset: int = 0) -> bytes:
        """Return the packed ids of `runs`, each `offset` further."""
        packed = b""
        for first, count in runs:
            first += offset
            end = first + count
            if end <= self._ids:
                packed += self._packed[UNIT_BYTES * first : UNIT_BYTES * end]
            else:
                packed += np.arange(first, end, dtype=_UNIT).tobytes()
        return packed


def window(runs: Runs, start: int, end: int) -> Runs:
    """Return the ids of units `start` to `end`, as far as there are any."""
    found: list[Run] = []
    at = 0
    for first, count in runs:
        if at >= end:
            break
        if at + count > start:
            # Comparisons, not min and max: this runs for every turn.
            low = start - at if at < start else 0
            high = end - at if at + count > end else count
            found.append((first + low, high - low))
        at += count
    return tuple(found) if start < end else ()


def unit_tokens_of(trace: Trace, shape: WorkloadShape) -> int:
    """Return the tokens of a unit: the trace's block, or as the shape says where it has none."""
    return shape.unit_tokens if trace.ids == "none" else trace.block_tokens


class UnitSpan(NamedTuple):
    """A span says which units a request touches; its prompt and its answer have at least one
    token."""

    full: int
    """Full units of the prompt alone."""
    units: int
    """Units of the prompt, a last partial one among them."""
    end: int
    """Full ones after decoding; the last sampled token is never computed."""

    @classmethod
    def of(cls, request: TraceRequest, unit_tokens: int) -> UnitSpan:
        prompt_tokens = request.input_tokens or 1
        end_tokens = prompt_tokens + (request.output_tokens or 1) - 1
        return cls(
            prompt_tokens // unit_tokens,
            -(-prompt_tokens // unit_tokens),
            end_tokens // unit_tokens,
        )

    def fresh_at_most(self, request: TraceRequest) -> int:
        """Return the fresh ids that a request can need: what `runs` lack, and all that it
        decodes."""
        _, units, end = self
        # Comparisons, not max: a workload asks it of every request before it begins.
        lacking = units
        for _, count in request.runs:
            lacking -= count
        return (lacking if lacking > 0 else 0) + (end - units if end > units else 0)


class UnitIds:
    """This class gives every session of a cast its ids."""

    def __init__(self, trace: Trace, parts: Sequence[PlayedSession], shape: WorkloadShape) -> None:
        self.unit_tokens = unit_tokens_of(trace, shape)
        self._trace = trace
        self._heads: dict[Triple, int] = {}
        self._widely: IntervalSet | None = None
        shared = 0
        if trace.ids == "trace":
            self._copy_ids = max((_end(session) for session in trace.sessions), default=0)
            copies = 1 + max(part.copy for part in parts)
            shared = self._copy_ids * copies
            if copies > 1:
                self._widely = _between_sessions(trace)
        elif trace.ids == "session" and shape.shared_heads is not None:
            shared = self._lay_heads(trace)
        spans = {part.source: self._span(trace.sessions[part.source]) for part in parts}
        ends = accumulate((spans[part.source] for part in parts), initial=shared)
        self._bases = list(ends)
        self._table = UnitIdTable(self._bases[-1])
        if self._bases[-1] > LIMIT:
            raise InvalidInput(
                "sessions",
                f"this run needs {self._bases[-1]:,} unit ids, more than the {LIMIT:,} of 32 bits",
                "run fewer sessions, or larger blocks",
            )

    def _lay_heads(self, trace: Trace) -> int:
        free = 0
        for session in trace.sessions:
            for agent in session.agents:
                key = (agent.tool_tokens, agent.system_tokens, agent.model)
                if key not in self._heads:
                    self._heads[key] = free
                    free += (key[0] + key[1]) // self.unit_tokens
        return free

    def _span(self, session: TraceSession) -> int:
        recorded = _end(session) if self._trace.ids == "session" else 0
        unit = self.unit_tokens
        return recorded + sum([UnitSpan.of(r, unit).fresh_at_most(r) for r in session.requests])

    def of_session(self, number: int, part: PlayedSession) -> SessionIds:
        """Return the ids of session `number` of the cast."""
        session = self._trace.sessions[part.source]
        base = self._bases[number]
        if self._trace.ids == "session":
            heads = self._heads_in(session) if self._heads else []
            fresh = base + _end(session)
            table = self._table
            return HeadedIds(table, heads, base, fresh) if heads else SessionIds(table, base, fresh)
        if self._widely is not None and part.copy:
            return CopiedIds(self._table, self._widely, part.copy * self._copy_ids, base)
        return SessionIds(self._table, 0, base)

    def _heads_in(self, session: TraceSession) -> list[tuple[Runs, int]]:
        """Return the heads in a session as (local ids, shared base): no two begin alike, none has
        another's base."""
        heads: list[tuple[Runs, int]] = []
        seen: set[int] = set()
        for request in session.requests:
            agent = session.agents[request.agent]
            size = (agent.tool_tokens + agent.system_tokens) // self.unit_tokens
            if request.agent in seen or not 0 < size <= blocks(request.runs):
                continue
            seen.add(request.agent)
            head = take(request.runs, size)
            base = self._heads[agent.tool_tokens, agent.system_tokens, agent.model]
            if all(base != other and not common_prefix(head, runs) for runs, other in heads):
                heads.append((head, base))
        return heads


def _end(session: TraceSession) -> int:
    """Return one more than the largest recorded id."""
    end = 0
    for request in session.requests:
        for first, count in request.runs:
            if first + count > end:
                end = first + count
    return end


def _between_sessions(trace: Trace) -> IntervalSet:
    """Return the ids that at least two sessions of the trace show. Ids are chained, so they are
    heads."""
    own = [IntervalSet() for _ in trace.sessions]
    for seen, session in zip(own, trace.sessions, strict=True):
        for request in session.requests:
            seen.add(request.runs)
    return covered_at_least(own, 2)


class SessionIds:
    """A session's ids lead from recorded ids to the run's: all are moved by `offset`."""

    __slots__ = ("_offset", "fresh", "table")

    def __init__(self, table: UnitIdTable, offset: int, fresh: int) -> None:
        self.table = table
        self._offset = offset
        self.fresh = fresh
        """The first of the ids that no recorded unit has."""

    def pack(self, runs: Runs, start: int, end: int) -> bytes:
        """Return the packed ids of units `start` to `end` of a recorded prompt, as far as it has
        them."""
        if not start:
            return self.table.pack(runs, self._offset)[: UNIT_BYTES * end]
        return self.table.pack(window(runs, start, end), self._offset)


class HeadedIds(SessionIds):
    """With these ids the beginnings that other sessions share keep ids of their own."""

    __slots__ = ("_heads",)

    def __init__(
        self, table: UnitIdTable, heads: list[tuple[Runs, int]], offset: int, fresh: int
    ) -> None:
        super().__init__(table, offset, fresh)
        self._heads = heads

    def pack(self, runs: Runs, start: int, end: int) -> bytes:
        for head, base in self._heads:
            shared = common_prefix(head, runs)
            if start < shared:
                head_ids = ((base + start, min(shared, end) - start),)
                return self.table.pack(head_ids) + super().pack(runs, min(shared, end), end)
        return super().pack(runs, start, end)


class CopiedIds(SessionIds):
    """These ids are a session's that is drawn again: what several sessions share stays, the rest is
    its own."""

    __slots__ = ("_widely",)

    def __init__(self, table: UnitIdTable, widely: IntervalSet, offset: int, fresh: int) -> None:
        super().__init__(table, offset, fresh)
        self._widely = widely

    def pack(self, runs: Runs, start: int, end: int) -> bytes:
        shared = min(self._widely.prefix(runs), end)
        head_ids = self.table.pack(window(runs, start, shared))
        return head_ids + super().pack(runs, max(start, shared), end)
