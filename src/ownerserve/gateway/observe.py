"""This module keeps what the gateway did, for people: latencies, token counts, the last decisions.

Owns no decision. Costs two list look-ups and a few additions a request; everything with a name or
a label is made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.stamps import PromptOutcome
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Dispatch, Refuse
from ownerserve.router.requests.body import Usage
from ownerserve.router.requests.identity import SessionIdentity

TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


_TOO_MANY = 429
"""From this status on an error is the fleet's or ours, not the client's."""


class Histogram:
    """A histogram counts values by bucket; `counts` has one more entry than `edges` (the rest)."""

    def __init__(self, edges: Sequence[float] = BUCKETS_S) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


Decided: TypeAlias = tuple[float, bytes, SessionIdentity | None, Dispatch | Refuse]
"""One decision: when (s), request id, who asked, what was decided."""


class Observer:
    """The observer is the gateway's memory of what it did. `now` stamps decisions."""

    def __init__(self, now: Callable[[], float], *, decisions_kept: int) -> None:
        self.decisions: deque[Decided] = deque(maxlen=decisions_kept)
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()
        self.rejections: Counter[str] = Counter()
        self.pressure: Counter[tuple[str, str]] = Counter()
        """(kind, reason): all that did not go as decided. Errors and fallbacks are one pressure:
        who counts only one of them hides it in the other (seed 003, v5)."""
        self.bad_lines: Counter[str] = Counter()
        """Fields of workers' answer lines that could not be used."""
        self.receipt_error_tokens = Histogram(TOKEN_BUCKETS)
        self.expected_cached_tokens = self.zero_hits = 0
        self.reseeds = self.lost_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._now = now

    def decided(
        self, request_id: bytes, identity: SessionIdentity | None, outcome: Dispatch | Refuse
    ) -> None:
        self.decisions.append((self._now(), request_id, identity, outcome))
        if isinstance(outcome, Dispatch) and outcome.decision.reason is DispatchReason.NOT_OFFERED:
            self.pressure["fallback", DispatchReason.NOT_OFFERED.value] += 1

    def rejected(self, rejected: Rejected) -> None:
        self.rejections[rejected.code] += 1
        if rejected.status >= _TOO_MANY:
            self.pressure["error", rejected.code] += 1

    def pressed(self, kind: str, reason: str) -> None:
        """Count a turn that could not go as it was decided."""
        self.pressure[kind, reason] += 1

    def compared(self, dispatch: Dispatch, usage: Usage | None, came: PromptOutcome) -> None:
        """Set the receipt against the engine's own count: was what we sent it for really there?"""
        expected = dispatch.decision.cached_tokens
        prompt_tokens = dispatch.prompt_tokens if usage is None else usage.prompt_tokens
        self.lost_tokens += min(came.lost_tokens, prompt_tokens)
        self.reseeds += came.mode is ExecutionMode.RESEED
        if came.mode is ExecutionMode.RESEED or (
            expected and came.mode is ExecutionMode.COLD_PREFILL
        ):
            self.pressure["fallback", came.mode.value] += 1
        if usage is None or not usage.tells_cached or dispatch.session is None:
            return
        self.expected_cached_tokens += expected
        self.receipt_error_tokens.observe(abs(expected - usage.cached_tokens))
        if expected and not usage.cached_tokens:
            self.zero_hits += 1

    def first_byte(self, duration_s: float) -> None:
        self.first_byte_s.observe(duration_s)

    def finished(self, duration_s: float, usage: Usage | None) -> None:
        self.duration_s.observe(duration_s)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.output_tokens += usage.output_tokens
