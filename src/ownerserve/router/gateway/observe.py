"""What the gateway did, kept for people: latencies, token counts, the last decisions.

Owns no decision. Costs two list look-ups and a few additions a request; everything with a name or
a label is made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeAlias

from ownerserve.router.gateway.replies import Rejected
from ownerserve.router.identity import Identity
from ownerserve.router.messages import Dispatch, Refuse
from ownerserve.router.usage import Usage

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of durations by bucket; `counts` has one more entry than BUCKETS_S (the rest)."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s


Decided: TypeAlias = tuple[float, bytes, Identity | None, Dispatch | Refuse]
"""One decision: when (s), request id, who asked, what was decided."""


class Observer:
    """The gateway's memory of itself. `now` stamps decisions."""

    def __init__(self, now: Callable[[], float], *, decisions_kept: int) -> None:
        self.decisions: deque[Decided] = deque(maxlen=decisions_kept)
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()
        self.rejections: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._now = now

    def decided(
        self, request_id: bytes, identity: Identity | None, outcome: Dispatch | Refuse
    ) -> None:
        self.decisions.append((self._now(), request_id, identity, outcome))

    def rejected(self, rejected: Rejected) -> None:
        self.rejections[rejected.code] += 1

    def first_byte(self, duration_s: float) -> None:
        self.first_byte_s.observe(duration_s)

    def finished(self, duration_s: float, usage: Usage | None) -> None:
        self.duration_s.observe(duration_s)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.output_tokens += usage.output_tokens
