"""This module defines what the planner is told: the model's state, the engine's abilities, and what
is held where.

Plain data, made by a node from the cache's match, the store's catalogue and the engine's word.
Positions are tokens from the start of the sequence.

    0 ───────── device ─────────┬── host ──┬─ disk ─┐ covered          N
    ├ spans[0]                  ├ spans[1] ├ spans[2]                  │
                  P             P                P   points            │ tokens asked for
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier


class Overlap(StrEnum):
    """Overlap is what of a load may run beside the compute that needs it."""

    NONE = "none"
    LAYERWISE = "layerwise"


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities are what an engine can do; the planner offers nothing else.

    can_replay       computes tokens below a write floor: their range state is kept, not overwritten
    can_reserve      gives space before the request runs: loads hide behind the queue
    per_group_hit    may go on with range state up to B and point state from somewhere else; without
                     it, all state beyond the device's own hit must come from outside, as one prefix
    can_insert       takes state that no request owns yet: prefetch into the device
    landing_tier     where foreign state lands; `host` means a second hop to the device
    overlap          what of a load may run beside compute
    """

    can_replay: bool
    can_reserve: bool
    per_group_hit: bool
    can_insert: bool
    landing_tier: Tier
    overlap: Overlap


FULL_ABILITIES = Abilities(
    can_replay=True,
    can_reserve=True,
    per_group_hit=True,
    can_insert=True,
    landing_tier=Tier.DEVICE,
    overlap=Overlap.LAYERWISE,
)


HF = msgspec.structs.replace(FULL_ABILITIES, overlap=Overlap.NONE)
"""The reference engine: everything, but a restore is whole before its first forward."""

VLLM = Abilities(
    can_replay=False,
    can_reserve=False,
    per_group_hit=False,
    can_insert=False,
    landing_tier=Tier.HOST,
    overlap=Overlap.NONE,
)
"""vLLM 0.32 on a GPU through our connector: one prefix length for all groups, foreign state lands
in host memory, nothing is replayed. On a CPU it lands where the engine reads it."""


def replaying_windows(abilities: Abilities) -> Abilities:
    """Return what an engine can do that also replays windows over what full attention has kept."""
    return msgspec.structs.replace(abilities, can_replay=True, per_group_hit=True)


VLLM_REPLAY = replaying_windows(VLLM)
"""vLLM 0.31 and 0.32 under our scheduler class, which the operator has to name (docs/vllm.md). Only
for models of full and sliding attention: plan.window_replay."""

ENGINES = {"hf": HF, "vllm": VLLM, "vllm-replay": VLLM_REPLAY, "ideal": FULL_ABILITIES}
"""By the name that commands take. `ideal` is no engine of today: it can do all that is planned."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """A model state is what the planner needs of a model's geometry.

    `exact_replay_tokens`: tokens to compute before a boundary so that its window state is exact,
    sum over window layers of (n_layer - 1); None when the model keeps recurrent state, which no
    replay of a suffix can rebuild. `bounded_replay_tokens` is the same for the approximate replay
    (one window). `point_bytes` is one boundary's state, 0 for a model that keeps none.
    """

    layers: int
    block_tokens: int
    range_bytes_per_token: float
    point_bytes: int = 0
    exact_replay_tokens: int | None = None
    bounded_replay_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1 or self.block_tokens < 1:
            raise InvalidInput("model", "has no layer or no block", "use 1 or more of each")


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A piece is bytes to bring from one tier.

    `ready_ms` > 0: a load that is already under way puts them there in so many ms (`device`: they
    are then in place).
    """

    tier: Tier
    bytes: int
    ready_ms: float = 0.0


class RangeSpan(msgspec.Struct, frozen=True, gc=False):
    """A run of tokens [start, end) whose range state can be had: `pieces` name what must be loaded.

    No pieces: all of it is on the device. Bytes that no piece names are on the device too.
    """

    start: int
    end: int
    pieces: tuple[Piece, ...] = ()


class Point(msgspec.Struct, frozen=True, gc=False):
    """A point is a boundary with point state, or one at which only range state stands.

    `pieces` are its components that must be loaded; `lacks` names those that nobody holds, so that
    only a replay can bring them. Both empty: all of it is on the device, or the model keeps none.
    """

    position: int
    pieces: tuple[Piece, ...] = ()
    lacks: tuple[str, ...] = ()


class Backlog(msgspec.Struct, frozen=True):
    """A backlog is work that stands before a new request, as observed now.

    `context_tokens` is the mean number of tokens already behind each of `prefill_tokens`;
    `tier_bytes` are the bytes asked of each tier and not yet delivered.
    """

    prefill_tokens: int = 0
    requests: int = 0
    context_tokens: int = 0
    tier_bytes: dict[Tier, int] = {}


class Exactness(StrEnum):
    """Exactness says whether the state a plan rebuilds is that of a cold run (design.md, Words)."""

    EXACT = "exact"
    BOUNDED_REPLAY = "approximate(bounded_replay)"


class RestoreQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A restore query asks for the state of one turn of `tokens` tokens.

    `spans` are contiguous from 0 and ascending, `points` descending (deepest first).
    `known_tokens`: how far the prompt repeats tokens that were computed once; what lies between
    the last boundary and there is the tail. `hbm_ms_per_gib` is lambda: what a GiB of device
    memory costs now, as the benefit per GiB of what would be evicted for it (plan.benefit).
    `allowed` is BOUNDED_REPLAY only when the request asked for it.
    """

    tokens: int
    spans: tuple[RangeSpan, ...] = ()
    points: tuple[Point, ...] = ()
    known_tokens: int = 0
    backlog: Backlog = Backlog()
    hbm_ms_per_gib: float = 0.0
    allowed: Exactness = Exactness.EXACT
