"""This module holds every number that a routing decision depends on, once, with its unit.

The defaults of T_hot, T_cool, lambda and mu come out of the procedure below, `derive`, for
DEFAULT_SPEED and the shared Claude-Code traces (docs/routing.md); a fleet that has measured its
own speeds derives its own.

**`derive`**: where T_hot, T_cool, lambda, delta and mu come from: a procedure, not a guess. In: a
worker's speed and what the fleet's sessions look like. Out: Settings. `Settings()` is what comes
out for DEFAULT_SPEED and CLAUDE_CODE (a test holds them together); `python
tools/routing_defaults.py` prints it for other models and GPUs. docs/routing.md explains it.

    T_hot      fetching the median context, or computing it where that is cheaper: a move costs
               that, and pays when the wait that it saves is longer
    hot ratio  1.5 x 1.5: two loads, each known within a factor of 1.5 (plan.cost.prices), are
               surely ordered from there on
    T_cool     moving the p90 context / 5 %: no session then spends more of its time on moves
    lambda     reuse share x the cheaper of loading a GiB back and computing it: what evicting a
               GiB costs its session
    delta      lambda: a copy that is left behind makes its holder evict as much once more
    mu         1 - step / (step + pass), for a pass of the median addition: the share of that time
               by which whoever decodes there gets on later
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.plan.cost.prices import UNTRUSTED_FACTOR
from ownerserve.router.worker import Speed


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings tune policies and prices; each has its unit in its name."""

    continuation_tokens: int = 16
    """At most so many new tokens: the turn only goes on decoding."""
    long_tokens: int = 8192
    """From so many new tokens on: a long tool output, or a new long prefix."""
    cold_after_s: float = 300.0
    """A session away for so long is taken to have been moved out of its owner's device memory."""
    candidates: int = 2
    """k: how many of the least loaded are priced beside owner and holders."""
    hot_ms: float = 1080.0
    """T_hot: the owner is hot when others' pending prefill tokens there take longer than this."""
    hot_ratio: float = 2.25
    """... and only if that is more than so many times the target's (the relative term)."""
    cool_s: float = 51.0
    """T_cool: a session that moved for load's sake stays for so long."""
    move_refill_share: float = 0.5
    """A session moves only to a worker that would then spend no more of its time than this on
    bringing back what it displaces, where the worker says so (LoadEstimate.refill_share)."""
    memory_ms_per_gib: float = 344.0
    """lambda: what a GiB of device memory newly taken costs whoever is evicted for it."""
    duplicate_ms_per_gib: float = 344.0
    """delta: what a GiB that a move leaves behind costs the sessions of who holds it."""
    interference: float = 0.91
    """mu: the share of a prefill's time by which each running decode is delayed."""
    output_tokens: int = 256
    """An answer's length until a session has shown its own."""


DEFAULTS = Settings()


MOVING_SHARE_MAX = 0.05
"""The share of a session's time that moves may take."""


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a workload that settings are derived from; `ownerserve trace stats` measures
    them."""

    context_tokens_p50: int
    context_tokens_p90: int
    addition_tokens_p50: int
    reuse_share: float
    """The share of input tokens that are a prefix of an earlier turn of the same session."""
    decoding: int = 8
    """Sequences in a worker's batch."""


CLAUDE_CODE = WorkloadFacts(
    context_tokens_p50=110_000,
    context_tokens_p90=261_000,
    addition_tokens_p50=758,
    reuse_share=0.96,
)
"""The shared Claude-Code traces (36,725 requests; docs/traces.md)."""


def derive(speed: Speed, sessions: WorkloadFacts = CLAUDE_CODE, *, spilled_to: Tier) -> Settings:
    """Derive the settings for a fleet of such workers, whose evicted state goes to the tier
    `spilled_to`."""
    context = sessions.context_tokens_p50
    addition = sessions.addition_tokens_p50
    gib_tokens = int(GIB / speed.kv_bytes_per_token)
    anew_ms = speed.prefill.ms(gib_tokens, max(context - gib_tokens, 0))
    memory_ms = sessions.reuse_share * min(speed.media[spilled_to].ms(GIB), anew_ms)
    step_ms = speed.step_ms + speed.step_ms_per_sequence * sessions.decoding
    pass_ms = speed.prefill.ms(addition, context)
    return Settings(
        hot_ms=move_ms(speed, context),
        hot_ratio=UNTRUSTED_FACTOR**2,
        cool_s=move_ms(speed, sessions.context_tokens_p90) / MOVING_SHARE_MAX / 1000.0,
        memory_ms_per_gib=memory_ms,
        duplicate_ms_per_gib=memory_ms,
        interference=1.0 - step_ms / (step_ms + pass_ms),
    )


def move_ms(speed: Speed, tokens: int) -> float:
    """Return how long it takes, in ms, to have a session of `tokens` tokens on another worker:
    fetched, or computed anew where that is faster."""
    fetch_ms = speed.media[Tier.PEER].ms(speed.sequence_bytes(tokens))
    fetch_ms += speed.prefill.ms(min(speed.replay_tokens, tokens), tokens)
    return min(fetch_ms, speed.prefill.ms(tokens, 0))
