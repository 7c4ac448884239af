"""Every number a routing decision depends on, once, with its unit.

The defaults of T_hot, T_cool, lambda and mu come out of the procedure in derive.py for
DEFAULT_SPEED and the shared Claude-Code traces (docs/routing.md); a fleet that has measured its
own speeds derives its own.
"""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What policies and prices are tuned by."""

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
    memory_ms_per_gib: float = 344.0
    """lambda: what a GiB of device memory newly taken costs whoever is evicted for it."""
    duplicate_ms_per_gib: float = 344.0
    """delta: what a GiB that a move leaves behind costs the sessions of who holds it."""
    interference: float = 0.91
    """mu: the share of a prefill's time by which each running decode is delayed."""
    output_tokens: int = 256
    """An answer's length until a session has shown its own."""


DEFAULTS = Settings()
