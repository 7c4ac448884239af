"""This module says what one policy did on the demo's workload, and makes the table that sets
policies side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from rich.table import Table

from ownerserve.kv.units import format_bytes


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

    @property
    def heat_moves(self) -> int:
        """How many turns the gateway sent away from a hot worker."""
        return self.reasons.get("hot_owner", 0)


def heat_line(name: str, result: PolicyResult) -> str:
    """Say how many turns left a hot worker under the policy `name`, or why none did, by its
    decisions."""
    moves = result.heat_moves
    if moves:
        return f"{name}: {moves} turn{'s' * (moves > 1)} left a hot worker"
    cooling, stuck, dear = (
        result.reasons.get(f"hot_{why}", 0) for why in ("cooling", "no_target", "too_dear")
    )
    met = cooling + stuck + dear
    if not met:
        return (
            f"{name}: no turn left its worker for heat: at no turn's arrival was its worker busier"
            " than T_hot and than the least busy one by the hot ratio (docs/routing.md)"
        )
    return (
        f"{name}: no turn left its worker for heat, though {met} met a hot one:"
        f" {stuck} had no other with room;"
        f" {dear} had one with room, where the turn would have cost more than the wait;"
        f" {cooling} had moved a short time before"
    )


def summary_table(results: Mapping[str, PolicyResult]) -> Table:
    """Make the table with seed 002's columns, a row for each policy."""
    table = Table(title="One workload, each policy on fresh workers", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for heading in ("TTFT ms\np50", "\np90", "TPOT ms\np90", "cached\nshare"):
        table.add_column(heading, justify="right")
    for heading in ("hotspot\nindex", "heat\nmoves", "wall-clock\nfactor"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.ttft_ms.p50:.0f}",
            f"{result.ttft_ms.p90:.0f}",
            f"{result.tpot_ms.p90:.1f}",
            f"{result.cached_token_share:.1%}",
            f"{result.hotspot_index:.2f}",
            str(result.heat_moves),
            f"{result.wall_clock_factor:.2f}",
        )
    return table


def policy_table(results: Mapping[str, PolicyResult]) -> Table:
    """Make the table with policies as columns and quantities as rows."""
    table = Table(title="One workload, each policy on fresh workers", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    columns = list(results.values())

    def row(label: str, cells: Sequence[str]) -> None:
        table.add_row(label, *cells)

    row("requests", [str(c.requests) for c in columns])
    row("errors", [str(c.errors) for c in columns])
    row("prompt tokens", [f"{c.prompt_tokens:,}" for c in columns])
    row("cached-token share", [f"{c.cached_token_share:.1%}" for c in columns])
    row("prefill tokens saved", [f"{c.prefill_tokens_saved:,}" for c in columns])
    row("TTFT p50 / p90, ms", [f"{c.ttft_ms.p50:.0f} / {c.ttft_ms.p90:.0f}" for c in columns])
    row("TPOT p90, ms", [f"{c.tpot_ms.p90:.1f}" for c in columns])
    row("hotspot index", [f"{c.hotspot_index:.2f}" for c in columns])
    row("heat moves", [str(c.heat_moves) for c in columns])
    row("wall-clock factor", [f"{c.wall_clock_factor:.2f}" for c in columns])
    row("session end to end, mean s", [f"{c.e2e_s.mean:.2f}" for c in columns])
    row("session end to end, p95 s", [f"{c.e2e_s.p95:.2f}" for c in columns])
    row(
        "requests by worker", [" / ".join(map(str, c.requests_by_worker.values())) for c in columns]
    )
    for mode in sorted({mode for c in columns for mode in c.modes}):
        row(f"turns: {mode}", [str(c.modes.get(mode, 0)) for c in columns])
    row("evictions", [f"{c.pressure.evictions:,}" for c in columns])
    row("tokens evicted", [f"{c.pressure.evicted_tokens:,}" for c in columns])
    row("freed beyond need, tokens", [f"{c.pressure.beyond_need_tokens:.1f}" for c in columns])
    for reason in sorted({reason for c in columns for reason in c.pressure.points_lost}):
        cells = [f"{c.pressure.points_lost.get(reason, 0):,}" for c in columns]
        row(f"restorable points lost: {reason}", cells)
    row("runs at a low watermark", [f"{c.pressure.relief_runs:,}" for c in columns])
    for component in dict.fromkeys(n for c in columns for n in c.pressure.evicted_slots):
        cells = [f"{c.pressure.evicted_slots.get(component, 0):,}" for c in columns]
        row(f"evicted: {component}", cells)
    for component in dict.fromkeys(n for c in columns for n in c.pressure.spilled_slots):
        cells = [f"{c.pressure.spilled_slots.get(component, 0):,}" for c in columns]
        row(f"spilled to host memory: {component}", cells)
    for message in sorted({message for c in columns for message in c.directory_messages}):
        cells = [f"{c.directory_messages.get(message, 0):,}" for c in columns]
        row(f"directory: {message}", cells)
    row("directory: workers' frames", [f"{c.directory_frames:,}" for c in columns])
    for request in sorted({request for c in columns for request in c.node_requests}):
        row(f"node RPC: {request}", [f"{c.node_requests.get(request, 0):,}" for c in columns])
    for component in dict.fromkeys(name for c in columns for name in c.kv_bytes):
        cells = [format_bytes(c.kv_bytes.get(component, 0)) for c in columns]
        row(f"KV kept: {component}", cells)
    return table
