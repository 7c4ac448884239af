"""This module measures what a cache without limits could re-use: the ideal bound, and where the
re-use comes from.

A prompt's re-usable prefix is its longest prefix of blocks seen before: by any session (bound of
a fleet that shares everything), or by its own (bound of affinity without sharing). All passes
are over runs and intervals; none is over blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownerserve.trace.model import Trace, TraceRequest
from ownerserve.trace.runs import IntervalSet, covered_at_least
from ownerserve.trace.transform import share_heads

SHARED_HEAD_SHARE = 0.02
SHARED_HEAD_SESSIONS = 3


class Reuse(NamedTuple):
    """The re-use has, per request and in order of arrival, the tokens re-usable and their sources.

    `intra` <= `any` <= the prompt's length. `head` is the part of `any` in blocks that many
    sessions use. `later` marks requests that are not their session's first.
    """

    input_tokens: NDArray[np.int64]
    any_tokens: NDArray[np.int64]
    intra_tokens: NDArray[np.int64]
    head_tokens: NDArray[np.int64]
    later: NDArray[np.bool_]

    def shares(self) -> tuple[float, float]:
        """Return the ideal cached-token share (any session, own session)."""
        total = max(1, int(self.input_tokens.sum()))
        return int(self.any_tokens.sum()) / total, int(self.intra_tokens.sum()) / total

    def split(self) -> tuple[float, float, float]:
        """Return the shares of all re-usable tokens found in (own session, another, a shared
        head)."""
        reused = int(self.any_tokens.sum())
        if not reused:
            return 0.0, 0.0, 0.0
        head = int(self.head_tokens.sum())
        intra = int(np.maximum(0, self.intra_tokens - self.head_tokens).sum())
        return intra / reused, (reused - intra - head) / reused, head / reused

    def uncached_suffix(self) -> NDArray[np.int64]:
        """Return the tokens that each later turn adds to what its own session had seen."""
        return (self.input_tokens - self.intra_tokens)[self.later]


def by_arrival(trace: Trace) -> Iterator[tuple[int, TraceRequest]]:
    """Yield (session number, request) in order of start, or session after session when not
    recorded."""
    if trace.arrivals == "unknown":
        for number, session in enumerate(trace.sessions):
            for request in session.requests:
                yield number, request
        return
    starts = [
        (session.start_s + request.start_s, number, position)
        for number, session in enumerate(trace.sessions)
        for position, request in enumerate(session.requests)
    ]
    starts.sort()
    for _, number, position in starts:
        yield number, trace.sessions[number].requests[position]


def ideal_reuse(trace: Trace) -> Reuse | None:
    """Return the re-use with an infinite cache, or None when the trace has no block ids.

    For session-local ids, re-use between sessions is estimated by `share_heads`.
    """
    if trace.ids == "none":
        return None
    trace = share_heads(trace)
    own = [IntervalSet() for _ in trace.sessions]
    for seen, session in zip(own, trace.sessions, strict=True):
        for request in session.requests:
            seen.add(request.runs)
    sessions = max(SHARED_HEAD_SESSIONS, ceil(SHARED_HEAD_SHARE * len(trace.sessions)))
    heads = covered_at_least(own, sessions)

    everyone = IntervalSet()
    own = [IntervalSet() for _ in trace.sessions]
    started = [False] * len(trace.sessions)
    rows: list[tuple[int, int, int, int, bool]] = []
    for number, request in by_arrival(trace):
        found = everyone.prefix(request.runs)
        intra = own[number].prefix(request.runs)
        head = min(found, heads.prefix(request.runs))
        rows.append((request.input_tokens, found, intra, head, started[number]))
        everyone.add(request.runs)
        own[number].add(request.runs)
        started[number] = True
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    lengths = table[:, 0]
    # A partial last block counts for what it holds, not for a whole block.
    capped = [np.minimum(table[:, column] * trace.block_tokens, lengths) for column in (1, 2, 3)]
    return Reuse(lengths, capped[0], capped[1], capped[2], table[:, 4].astype(bool))
