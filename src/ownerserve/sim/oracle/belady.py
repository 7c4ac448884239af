"""This module computes Belady's bound on one replay: the fewest tokens that had to be computed
again.

Given which turn ran where and in which order, and a device's room in tokens. Each conversation
keeps a prefix; when room is short the one whose next turn there comes last is trimmed from its
tail (all tokens weigh the same in bytes, and a tail is never worth less per byte than what stands
before it is to lose). Re-use between conversations is left out, so where sessions share heads the
bound is that much too high, and the result says so by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

import msgspec


class TurnAccess(msgspec.Struct, frozen=True, gc=False):
    """An access is a turn as it ran: `reusable_tokens` of its prompt are a prefix of what its
    conversation computed before; it leaves `context_tokens` behind."""

    worker: int
    conversation: str
    reusable_tokens: int
    prompt_tokens: int
    context_tokens: int


class ReuseBound(msgspec.Struct, frozen=True):
    """The bound has the prompt tokens of all turns, and those that need not have been computed."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def cached_token_share(self) -> float:
        """`cached_token_share` is the share of prompt tokens that need no compute."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def bound(accesses: Sequence[TurnAccess], room_tokens: int) -> ReuseBound:
    """Return the least computing, over all workers. `accesses` stand in the order in which they
    ran."""
    by_worker: dict[int, list[TurnAccess]] = {}
    for access in accesses:
        by_worker.setdefault(access.worker, []).append(access)
    cached = sum(_device(turns, room_tokens) for turns in by_worker.values())
    return ReuseBound(sum(access.prompt_tokens for access in accesses), cached)


def _device(turns: Sequence[TurnAccess], room_tokens: int) -> int:
    following = _following(turns)
    held: dict[str, int] = {}
    latest: list[tuple[float, str]] = []  # (-next use, conversation), checked when it is popped
    next_use: dict[str, float] = {}
    total = cached = 0
    for index, turn in enumerate(turns):
        name = turn.conversation
        resident = held.get(name, 0)
        cached += min(resident, turn.reusable_tokens, max(turn.prompt_tokens - 1, 0))
        total += turn.context_tokens - resident
        held[name] = turn.context_tokens
        next_use[name] = following[index]
        heappush(latest, (-following[index], name))
        while total > room_tokens and latest:
            use, victim = latest[0]
            if next_use.get(victim) != -use or not held.get(victim):
                heappop(latest)
                continue
            cut = min(held[victim], total - room_tokens)
            held[victim] -= cut
            total -= cut
            if not held[victim]:
                heappop(latest)
    return cached


def _following(turns: Sequence[TurnAccess]) -> list[float]:
    """Return, for each turn, the index of its conversation's next one on the device; inf for
    none."""
    following = [inf] * len(turns)
    seen: dict[str, int] = {}
    for index in range(len(turns) - 1, -1, -1):
        following[index] = seen.get(turns[index].conversation, inf)
        seen[turns[index].conversation] = index
    return following
