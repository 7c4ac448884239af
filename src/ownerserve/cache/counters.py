"""Counters are what a cache counts while it works: sums that only rise, and why restorable points
were lost.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class LossCause(StrEnum):
    """LossCause says why a restorable point is one no more."""

    RANGE_EVICTED = "range_evicted"
    POINT_EVICTED = "point_evicted"
    SUPERSEDED = "superseded"
    NO_ROOM = "no_room"


class Counters(msgspec.Struct):
    """Counters are sums since the start. Evicted tokens and bytes are those of range blocks."""

    turns_begun: int = 0
    turns_refused: int = 0
    turns_finished: int = 0
    turns_aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    """Tokens a known session had computed before and must compute again."""
    evictions: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0
    wanted_tokens: int = 0
    """What those evictions were asked for; evicted minus wanted is waste, here always none."""
    largest_eviction_tokens: int = 0
    duplicate_blocks: int = 0
    no_room: int = 0
    quarantined: int = 0
    points_lost: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(LossCause, 0))
    evicted_points: dict[str, int] = msgspec.field(default_factory=dict)
    """Slots of each point component that were evicted; superseded ones are not among them."""
    relief_runs: int = 0
    """Times that a watermark was crossed and the pressure engine freed or spilled something."""
    spilled_points: int = 0
    """Boundaries whose point state was copied below for the room it takes."""
    failed_spills: int = 0
    """Spills, each of several boundaries, that came to nothing."""
