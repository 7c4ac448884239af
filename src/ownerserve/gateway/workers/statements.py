"""From what a worker states of itself (kv.wire.status) to the profile that the router prices by.

Owns what stands in for a part that is not stated. Pure; never raises: what can't be used is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import (
    ProfileStatement,
    SpeedStatement,
    TierStatement,
    WorkerStatus,
)
from ownerserve.plan.cost.coefficients import Coefficients
from ownerserve.plan.cost.load import Medium
from ownerserve.router.worker import EVERY_ENGINE, Profile, Role, Speed


def profile_of(status: WorkerStatus, *, default: Speed) -> tuple[Profile, tuple[str, ...]]:
    """The router's profile of a worker, but for its models, and what of its statement was not
    understood. `default` prices what it does not state."""
    stated = status.profile
    problems: list[str] = []
    profile = Profile(
        spec_digest=stated.spec_digest,
        role=_role(stated.role, problems),
        speed=_speed(stated, default),
        actions=_actions(stated.actions),
        kv_bytes_total=status.load.kv_bytes_total,
        sequence_tokens=stated.sequence_tokens,
        is_measured=_is_measured(stated.speed),
    )
    return profile, tuple(problems)


def _role(stated: str, problems: list[str]) -> Role:
    try:
        return Role(stated)
    except ValueError:
        problems.append(f"profile.role: {stated!r}")
        return Role.HYBRID


def _actions(stated: Sequence[str] | None) -> frozenset[PlacementAction]:
    """Words of a later version are none of ours; who says none can do what any engine can."""
    known = {action.value for action in PlacementAction}
    actions = frozenset(PlacementAction(word) for word in stated or () if word in known)
    return actions or EVERY_ENGINE


def _speed(stated: ProfileStatement, default: Speed) -> Speed:
    media = dict(default.media)
    for tier in stated.tiers:
        if tier.name in _TIERS:
            media[Tier(tier.name)] = _medium(tier)
    token_bytes = stated.kv_bytes_per_token
    if not token_bytes and not stated.kv_bytes_per_sequence:  # else it is purely recurrent
        token_bytes = default.kv_bytes_per_token
    speed = replace(
        default,
        media=media,
        kv_bytes_per_token=token_bytes,
        kv_bytes_per_sequence=stated.kv_bytes_per_sequence,
    )
    return speed if stated.speed is None else _at(speed, stated.speed)


def _is_measured(stated: SpeedStatement | None) -> bool:
    """Whether the worker has run both kinds of work; one that states no speed has measured none."""
    return stated is not None and None not in (stated.prefill_measured_s, stated.step_measured_s)


_TIERS = frozenset(tier.value for tier in Tier)


def _medium(tier: TierStatement) -> Medium:
    return Medium(tier.latency_ms, tier.bytes_per_ms)


def _at(speed: Speed, stated: SpeedStatement) -> Speed:
    """`speed`, computing as stated."""
    prefill = Coefficients(
        stated.prefill_pass_ms, stated.prefill_token_ms, stated.prefill_attention_ms
    )
    return replace(
        speed,
        prefill=prefill,
        step_ms=stated.step_ms,
        step_ms_per_sequence=stated.step_ms_per_sequence,
        replay_tokens=stated.replay_tokens,
    )
