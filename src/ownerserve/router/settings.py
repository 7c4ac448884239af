"""This module holds every number that a routing decision depends on, once, with its unit.

T_hot, T_cool, lambda, delta and mu come out of the procedure below, `derive`, and follow the fleet:
`router.learning` derives them anew from the turns that end there and its workers' speeds.

**`derive`** is a procedure, not a guess. In: a worker's speed and what the fleet's sessions look
like. Out: Settings. `Settings()`, with which every router begins, is what comes out for
DEFAULT_SPEED and PRIOR (a test holds them together); `python tools/routing_defaults.py` prints it
for other models and GPUs. docs/routing.md explains it. No number here is of a recorded trace.

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
    hot_ms: float = 323.0
    """T_hot: the owner is hot when others' pending prefill tokens there take longer than this."""
    hot_ratio: float = 2.25
    """... and only if that is more than so many times the target's (the relative term)."""
    cool_s: float = 25.8
    """T_cool: a session that moved for load's sake stays for so long."""
    move_refill_share: float = 0.5
    """A session moves only to a worker that would then spend no more of its time than this on
    bringing back what it displaces, where the worker says so (LoadEstimate.refill_share)."""
    memory_ms_per_gib: float = 322.0
    """lambda: what a GiB of device memory newly taken costs whoever is evicted for it."""
    duplicate_ms_per_gib: float = 322.0
    """delta: what a GiB that a move leaves behind costs the sessions of who holds it."""
    interference: float = 0.83
    """mu: the share of a prefill's time by which each running decode is delayed."""
    output_tokens: int = 256
    """An answer's length until a session has shown its own."""
    by_hand: tuple[str, ...] = ()
    """Which of DERIVED somebody gave: these stay as they are, whatever is learnt."""

    def following(self, derived: Settings) -> Settings:
        """Return these settings with the numbers of DERIVED from `derived`, but those by hand."""
        names = [name for name in DERIVED if name not in self.by_hand]
        return msgspec.structs.replace(self, **{name: getattr(derived, name) for name in names})


DERIVED = ("hot_ms", "cool_s", "memory_ms_per_gib", "duplicate_ms_per_gib", "interference")
"""The settings that `derive` makes from speeds and sessions."""
DEFAULTS = Settings()


def by_hand(settings: Settings, **given: float | None) -> Settings:
    """Return the settings with the numbers of DERIVED that are given, to stay; None: not given."""
    said = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(settings, **said, by_hand=tuple(sorted(said)))


MOVING_SHARE_MAX = 0.05
"""The share of a session's time that moves may take."""

MOVE_MIN_MS = 50.0
"""A move is taken to cost no less: a router's word on a queue is as old as that (--news-ms)."""


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a workload that settings are derived from; a router learns its own fleet's
    (router.workload)."""

    context_tokens_p50: int
    """The context that a turn leaves: its prompt and its answer."""
    context_tokens_p90: int
    addition_tokens_p50: int
    reuse_share: float
    """The share of input tokens that are a prefix of an earlier turn of the same session."""
    decoding: float = 8.0
    """Sequences in a worker's batch."""


PRIOR = WorkloadFacts(
    context_tokens_p50=32_768,
    context_tokens_p90=131_072,
    addition_tokens_p50=1024,
    reuse_share=0.9,
)
"""What sessions are taken to be like until a fleet has seen its own. Round numbers of no trace:
131,072 tokens is the context that most models of today are served with, which one session in ten
fills, and the median a quarter of it; 1,024 tokens are a tool's answer of a page or two."""


def derive(speed: Speed, sessions: WorkloadFacts = PRIOR, *, spilled_to: Tier) -> Settings:
    """Derive the settings for a fleet of such workers, whose evicted state goes to the tier
    `spilled_to`."""
    context = sessions.context_tokens_p50
    step_ms = speed.step_ms + speed.step_ms_per_sequence * sessions.decoding
    pass_ms = speed.prefill.ms(sessions.addition_tokens_p50, context)
    both_ms = step_ms + pass_ms
    memory_ms = sessions.reuse_share * _gib_back_ms(speed, context, spilled_to)
    return Settings(
        hot_ms=move_ms(speed, context),
        hot_ratio=UNTRUSTED_FACTOR**2,
        cool_s=move_ms(speed, sessions.context_tokens_p90) / MOVING_SHARE_MAX / 1000.0,
        memory_ms_per_gib=memory_ms,
        duplicate_ms_per_gib=memory_ms,
        interference=pass_ms / both_ms if both_ms else 0.0,
    )


def _gib_back_ms(speed: Speed, context: int, spilled_to: Tier) -> float:
    """Return how long it takes, in ms, to have an evicted GiB of a context back: loaded, or
    computed anew where that is faster."""
    load_ms = speed.media[spilled_to].ms(GIB)
    if not speed.kv_bytes_per_token:
        return load_ms  # its bytes say nothing of how many tokens they are
    gib_tokens = int(GIB / speed.kv_bytes_per_token)
    return min(load_ms, speed.prefill.ms(gib_tokens, max(context - gib_tokens, 0)))


def move_ms(speed: Speed, tokens: int) -> float:
    """Return how long it takes, in ms, to have a session of `tokens` tokens on another worker:
    fetched, or computed anew where that is faster."""
    fetch_ms = speed.media[Tier.PEER].ms(speed.sequence_bytes(tokens))
    fetch_ms += speed.prefill.ms(min(speed.replay_tokens, tokens), tokens)
    return max(min(fetch_ms, speed.prefill.ms(tokens, 0)), MOVE_MIN_MS)
