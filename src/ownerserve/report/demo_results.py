"""This module says what one run of the demo measured: one policy, on workers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Spread(msgspec.Struct, frozen=True):
    """A spread is the mean and percentiles of one quantity."""

    mean: float
    p50: float
    p90: float
    p95: float


def spread(values: Sequence[float]) -> Spread:
    """Return mean, p50, p90 and p95 of `values`; zeros when empty."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(float(np.mean(values)), *(float(np.percentile(values, q)) for q in (50, 90, 95)))


class PoolUse(msgspec.Struct, frozen=True):
    """A pool's use has, by component, a worker's slots, the free ones, and the bytes of one
    slot."""

    slots: dict[str, int]
    free_slots: dict[str, int]
    slot_bytes: dict[str, int]

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes in use by component."""
        return {
            name: (self.slots[name] - self.free_slots[name]) * size
            for name, size in self.slot_bytes.items()
        }


class PressureTotals(msgspec.Struct):
    """The totals say what memory pressure did on all workers.

    They are the sums of the caches' counters, and what was copied to their stores. Blocks and
    boundaries are counted by component.
    """

    evictions: int = 0
    evicted_tokens: int = 0
    wanted_tokens: int = 0
    relief_runs: int = 0
    spilled_points: int = 0
    points_lost: dict[str, int] = {}
    evicted_points: dict[str, int] = {}
    evicted_blocks: dict[str, int] = {}
    spilled_slots: dict[str, int] = {}

    def add(self, other: PressureTotals) -> None:
        """Add the counts of `other` to these, in place."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, mine + theirs)

    @property
    def evicted_slots(self) -> dict[str, int]:
        """The blocks and boundaries evicted, by component."""
        return self.evicted_blocks | self.evicted_points

    @property
    def beyond_need_tokens(self) -> float:
        """The tokens freed beyond what was asked for, a mean per eviction."""
        return (self.evicted_tokens - self.wanted_tokens) / max(self.evictions, 1)


class PolicyResult(msgspec.Struct, frozen=True):
    """A policy's result is what one run of the demo measured.

    `modes`: execution mode -> turns. `e2e_s`: per session, gaps included.

    `cached_token_share`: of the prompt tokens, those that no worker computed, by the workers' own
    counts. `sources`: prompt tokens that were at hand at the worker that answered, by where they
    were: on its `device`, or loaded for the turn from a tier, a `peer`, or the peer that computed
    the prompt (`remote_prefill`). `moves`: turns that ran at another worker than the turn of their
    session before. `peer_bytes`: state that workers read of each other. `others_cpu_share`: of the
    machine's CPU while the workload ran, what processes not of the demo took; None: not known.

    `tpot_ms`: per turn, the time of each output token after the first. `hotspot_index`: prompt
    tokens computed by the busiest worker over the mean of all (1 = even). `wall_clock_factor`: how
    long the run took over how long it takes when answers cost no time (arrivals and tool gaps).
    `kv_bytes`: component -> bytes in use on all workers when the last turn ended. `reasons`: why
    the gateway's decisions went where they did -> dispatches. `directory_messages`: what the
    directory was asked, by type; workers did it in `directory_frames`. `node_requests`: what the
    gateway asked of workers' nodes, by type.
    """

    requests: int
    errors: int
    prompt_tokens: int
    computed_tokens: int
    cached_token_share: float
    prefill_tokens_saved: int
    ttft_ms: Spread
    tpot_ms: Spread
    hotspot_index: float
    wall_clock_factor: float
    e2e_s: Spread
    modes: dict[str, int]
    requests_by_worker: dict[str, int]
    kv_bytes: dict[str, int]
    pressure: PressureTotals
    first_errors: list[str]
    reasons: dict[str, int] = {}
    directory_messages: dict[str, int] = {}
    directory_frames: int = 0
    node_requests: dict[str, int] = {}
    sources: dict[str, int] = {}
    moves: int = 0
    peer_bytes: int = 0
    others_cpu_share: float | None = None

    @property
    def heat_moves(self) -> int:
        """How many turns the gateway sent away from a hot worker."""
        return self.reasons.get("hot_owner", 0)

    @property
    def turns_apart(self) -> int:
        """How many turns' prompts another worker computed."""
        return self.modes.get("remote_prefill", 0)

    def share_of(self, source: str) -> float:
        """Return the share of the prompt tokens that were at hand from this source."""
        return self.sources.get(source, 0) / self.prompt_tokens if self.prompt_tokens else 0.0
