"""What a worker is, as it says itself; its speed follows what it measures.

Owns the words for it, no load. A worker that says nothing serves every model, at the speed of
DEFAULT_SPEED, and can do what any engine can.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.plan.cost.coefficients import Coefficients
from ownerserve.plan.cost.load import Medium

FIRST_PROMPT_TOKENS = 8192
LOADED_TIERS = (Tier.HOST, Tier.DISK, Tier.PEER, Tier.REMOTE)


class Role(StrEnum):
    """Which part of a turn a worker takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Runs turns to their end; computes a short addition to what it holds itself."""
    HYBRID = "hybrid"


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What things take on a worker: measured by its node (plan.cost), else from a data sheet.

    A decode step takes `step_ms` + `step_ms_per_sequence` x batch. `media`: loading from its own
    host memory and disk, from a peer's memory over the network, from the shared store.
    `replay_tokens`: what is computed again after state came from anywhere but the device, beside
    the tail (0 where point state is kept; kv.geometry). A sequence takes `kv_bytes_per_sequence`
    of device memory, and `kv_bytes_per_token` more for each of its tokens.
    """

    prefill: Coefficients
    step_ms: float
    step_ms_per_sequence: float
    media: dict[Tier, Medium]
    kv_bytes_per_token: float
    kv_bytes_per_sequence: float = 0.0
    replay_tokens: int = 0
    first_prompt_ms: float = 0.0
    """Made here: the prefill of FIRST_PROMPT_TOKENS; it orders workers of unlike speed."""

    def __post_init__(self) -> None:
        missing = [tier.value for tier in LOADED_TIERS if tier not in self.media]
        if missing:
            raise InvalidInput("speed.media", f"lacks {', '.join(missing)}", "price every tier")
        msgspec.structs.force_setattr(
            self, "first_prompt_ms", self.prefill.ms(FIRST_PROMPT_TOKENS, 0)
        )

    def sequence_bytes(self, tokens: int) -> float:
        """Device memory that a sequence of `tokens` takes; nothing for none."""
        if tokens <= 0:
            return 0.0
        return self.kv_bytes_per_sequence + tokens * self.kv_bytes_per_token


DEFAULT_SPEED = Speed(
    prefill=Coefficients(6.0, 0.0122, 1.45e-6),
    step_ms=6.0,
    step_ms_per_sequence=1.0,
    media={
        Tier.HOST: Medium(0.05, 51.2e6),
        Tier.DISK: Medium(0.3, 3.0e6),
        Tier.PEER: Medium(0.5, 10.0e6),
        Tier.REMOTE: Medium(8.0, 1.0e6),
    },
    kv_bytes_per_token=98304.0,
)
"""Qwen3-30B-A3B on one H200 by data sheet (plan.cost.roofline), 50k tokens a sequence."""

EVERY_ENGINE = frozenset({
    PlacementAction.COLOCATED_PREFILL,
    PlacementAction.DECODE_CONTINUATION,
})  # fmt: skip
EVERY_ACTION = frozenset(PlacementAction)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One routing unit. Candidates are filtered by it; state moves only between equal digests.

    `model` "": any. `adapters` are names it answers to beside `model`. `spec_digest`: of the
    attention spec, numerics and layout version. `actions`: the placement actions that it can carry
    out as the worker that runs the turn; nothing else in the router asks which engine it is.
    """

    model: str = ""
    adapters: frozenset[str] = frozenset()
    spec_digest: str = ""
    role: Role = Role.HYBRID
    speed: Speed = DEFAULT_SPEED
    actions: frozenset[PlacementAction] = EVERY_ENGINE
    kv_bytes_total: int = 0
    """Device memory for state; 0: unknown, taken as enough."""
    sequence_tokens: int = 0
    """The longest sequence it takes; 0: not said."""

    @property
    def names(self) -> frozenset[str]:
        return self.adapters | {self.model}


UNKNOWN = Profile()
