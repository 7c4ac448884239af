"""Rate limits are two token buckets for each tenant that has them: requests, and tokens that it has
computed.

A bucket holds a minute's worth at most and fills steadily. A turn is let by while the bucket has
what it is expected to take (or is full, for one that takes more than a minute's worth); it pays
that at once, and at its end the difference to what it took: prompt tokens that were not cached, and
the answer's. So a bucket may be in debt, and what was cached is free. A refusal takes nothing, and
says exactly when the bucket will have enough, if nobody else takes from it.

Owns the levels. The limits come with each call, so that new ones hold at once. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ownerserve.router.decision import Label
from ownerserve.router.entry.terms import TenantTerms

MINUTE_S = 60.0


class LimitKind(Label):
    """A limit's kind says what it counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"


class LimitState(msgspec.Struct, frozen=True):
    """A limit's state is what its tenant is told of it: what it has left, and after how long it
    will have all of it again."""

    kind: LimitKind
    per_minute: float
    left: float
    reset_s: float


class OverLimit(msgspec.Struct, frozen=True):
    """A turn is over a limit; with `retry_after_s` the bucket has enough for it."""

    kind: LimitKind
    per_minute: float
    retry_after_s: float


class _Bucket:
    """A bucket is what was taken from a full one and has not come back, as of `at_s`."""

    __slots__ = ("at_s", "taken")

    def __init__(self, now_s: float) -> None:
        self.taken = 0.0
        self.at_s = now_s

    def left(self, per_minute: float, now_s: float) -> float:
        """Return what is in it now."""
        self.taken = max(self.taken - (now_s - self.at_s) * per_minute / MINUTE_S, 0.0)
        self.at_s = now_s
        return per_minute - self.taken

    def wait_s(self, amount: float, per_minute: float, now_s: float) -> float:
        """Return after how long `amount` may be taken; 0: now."""
        missing = min(amount, per_minute) - self.left(per_minute, now_s)
        return max(missing, 0.0) * MINUTE_S / per_minute


class RateLimits:
    """Rate limits hold the buckets of all tenants that have limits."""

    def __init__(self) -> None:
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def look(
        self, tenant: str, terms: TenantTerms, tokens: int, *, now_s: float
    ) -> OverLimit | None:
        """Return the limit that a request of `tokens` is over, the one that lasts longest; None:
        none. Nothing is taken."""
        found: OverLimit | None = None
        for kind, per_minute, bucket in self._buckets(tenant, terms, now_s):
            amount = 1 if kind is LimitKind.REQUESTS else tokens
            wait_s = bucket.wait_s(amount, per_minute, now_s)
            if wait_s > 0.0 and (found is None or wait_s > found.retry_after_s):
                found = OverLimit(kind, per_minute, wait_s)
        return found

    def take(self, tenant: str, terms: TenantTerms, tokens: int, *, now_s: float) -> None:
        """Take what a request of `tokens` is expected to need."""
        for kind, per_minute, bucket in self._buckets(tenant, terms, now_s):
            bucket.left(per_minute, now_s)
            bucket.taken += 1 if kind is LimitKind.REQUESTS else tokens

    def settle(self, tenant: str, terms: TenantTerms, tokens: int, *, now_s: float) -> None:
        """Take `tokens` more, or give them back where negative: what a turn took beyond what was
        expected."""
        if terms.tokens_per_minute is not None:
            bucket = self._bucket(self._tokens, tenant, now_s)
            bucket.left(terms.tokens_per_minute, now_s)
            bucket.taken = max(bucket.taken + tokens, 0.0)

    def states(self, tenant: str, terms: TenantTerms, now_s: float) -> list[LimitState]:
        """Return the states of the tenant's limits."""
        return [
            LimitState(
                kind,
                per_minute,
                max(bucket.left(per_minute, now_s), 0.0),
                bucket.taken * MINUTE_S / per_minute,
            )
            for kind, per_minute, bucket in self._buckets(tenant, terms, now_s)
        ]

    def _buckets(
        self, tenant: str, terms: TenantTerms, now_s: float
    ) -> Iterator[tuple[LimitKind, float, _Bucket]]:
        if terms.requests_per_minute is not None:
            bucket = self._bucket(self._requests, tenant, now_s)
            yield LimitKind.REQUESTS, terms.requests_per_minute, bucket
        if terms.tokens_per_minute is not None:
            bucket = self._bucket(self._tokens, tenant, now_s)
            yield LimitKind.TOKENS, terms.tokens_per_minute, bucket

    def _bucket(self, buckets: dict[str, _Bucket], tenant: str, now_s: float) -> _Bucket:
        bucket = buckets.get(tenant)
        if bucket is None:
            bucket = buckets[tenant] = _Bucket(now_s)
        return bucket
