"""From a trace to what `replay` reads: ids made global, answers guessed, waits resolved.

An answer's blocks take the ids that the agent's next prompt has there, if that prompt continues
this one (then the answer came back as it was); else ids that no prompt has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ownerserve.trace.model import Trace, TraceSession, release_delay_s, waits_for
from ownerserve.trace.runs import blocks, expand

MIN_SERVICE_S = 0.5
FIRST_PRIVATE_ID = 1 << 31


class Ids:
    """Gives every session's block ids a range of their own, and makes ids that nobody has."""

    def __init__(self, trace: Trace) -> None:
        self._is_global = trace.ids == "trace"
        self._base = 0
        self._private = FIRST_PRIVATE_ID

    def base_for(self, session: TraceSession) -> int:
        if self._is_global:
            return 0
        ends = (first + count for r in session.requests for first, count in r.runs)
        base, self._base = self._base, self._base + max(ends, default=0)
        assert self._base < FIRST_PRIVATE_ID
        return base

    def private(self, count: int) -> list[int]:
        first, self._private = self._private, self._private + count
        return list(range(first, first + count))


def write(trace: Trace, path: Path, *, longest_blocks: int) -> int:
    """Write the sessions that fit; returns how many. One with a longer prompt is left out."""
    ids, chains = Ids(trace), 0
    rows: list[list[tuple[object, ...]]] = []
    for session in trace.sessions:
        size = trace.block_tokens
        if max(r.input_tokens + r.output_tokens for r in session.requests) <= longest_blocks * size:
            rows.append(list(_rows(session, len(rows), ids=ids, block=size, chain=chains)))
            chains += len(session.agents)
    path.write_text(json.dumps(rows))
    return len(rows)


def _rows(
    session: TraceSession, number: int, *, ids: Ids, block: int, chain: int
) -> Iterator[tuple[object, ...]]:
    base, waits = ids.base_for(session), waits_for(session)
    for position, request in enumerate(session.requests):
        full = min(request.input_tokens // block, blocks(request.runs))
        own = [base + unit for unit in expand(request.runs)][:full]
        total = -(-(request.input_tokens + request.output_tokens) // block)
        grown = (request.input_tokens + request.output_tokens) // block - full
        later = [r for r in session.requests[position + 1 :] if r.agent == request.agent]
        answer: list[int] = []
        if later and full:
            onward = [base + unit for unit in expand(later[0].runs)][: full + grown]
            if len(onward) > full and onward[full - 1] == own[-1]:
                answer = onward[full:]
        answer += ids.private(grown - len(answer))
        yield (
            number,
            chain + request.agent,
            own,
            answer,
            max(0, request.input_tokens - 1) // block,
            max(total, full + len(answer)),
            waits[position],
            release_delay_s(session, position, waits[position]),
            max(MIN_SERVICE_S, request.api_s or 0.0),
            bool(later),
        )
