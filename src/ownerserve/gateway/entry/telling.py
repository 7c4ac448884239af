"""This module tells clients of limits: the answers to who is not let in, and the lines that say
what is left, as OpenAI names them.

    x-ratelimit-limit-requests: 60          x-ratelimit-limit-tokens: 200000
    x-ratelimit-remaining-requests: 12      x-ratelimit-remaining-tokens: 151230
    x-ratelimit-reset-requests: 48s         x-ratelimit-reset-tokens: 14.631s

And what a turn waited for before the fleet: for a seat, from the 3rd place of 12 on, then to run:

    x-ownerserve-wait: seat;ms=12040;place=3;of=12, running;ms=310;place=1;of=1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from math import ceil

from ownerserve.gateway.http.replies import Rejected
from ownerserve.kv.wire.headers import WAIT_HEADER, header_line
from ownerserve.router.entry.limits import LimitState, OverLimit
from ownerserve.router.entry.terms import TurnAwayReason, TurnedAway, TurnWait

_MESSAGES = {
    TurnAwayReason.QUEUE_FULL: "the fleet is full, and so is the queue before it",
    TurnAwayReason.DEADLINE_UNMET: "the fleet is full: this would wait beyond its deadline",
    TurnAwayReason.DEADLINE_PAST: "the fleet is full: this waited until its deadline",
}


def not_let_in(no: TurnedAway, waits: Sequence[TurnWait]) -> Rejected:
    """Return the rejection for a turn that the queue turned away, once it had waited so."""
    retry_after_s = ceil(no.retry_after_s)
    message = f"{_MESSAGES[no.reason]}; by its present pace retry in {retry_after_s} s"
    return Rejected(
        HTTPStatus.TOO_MANY_REQUESTS,
        no.reason.value,
        message,
        retry_after_s=retry_after_s,
        lines=wait_line(waits),
    )


def wait_line(waits: Sequence[TurnWait]) -> bytes:
    """Return the header line that tells what a turn waited for, each with its place in line when it
    came; empty for one that did not wait."""
    if not waits:
        return b""
    said = ", ".join(
        f"{one.reason.value};ms={one.waited_s * 1000:.0f};place={one.came.place};of={one.came.of}"
        for one in waits
    )
    return header_line(WAIT_HEADER, said)


def over_limit(over: OverLimit, states: Iterable[LimitState]) -> Rejected:
    """Return the rejection for a turn that is over its tenant's rate limit."""
    wait_s = over.retry_after_s
    message = (
        f"rate limit: {over.per_minute:g} {over.kind.value} a minute are used up;"
        f" retry in {wait_s:.3f} s"
    )
    return Rejected(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limit_exceeded",
        message,
        retry_after_s=max(ceil(wait_s), 1),
        limit=over.kind.value,
        lines=limit_lines(states),
    )


def limit_lines(states: Iterable[LimitState]) -> bytes:
    """Return the header lines that tell what is left of limits."""
    return b"".join(
        b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n"
        % (
            (kind := state.kind.value.encode()),
            int(state.per_minute),
            kind,
            int(state.left),
            kind,
            _duration(state.reset_s),
        )
        for state in states
    )


def _duration(seconds: float) -> bytes:
    """Return a duration as OpenAI writes it: 120ms, 1.5s, 6m0s."""
    ms = ceil(seconds * 1000.0)
    if ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    rest = f"{ms / 1000.0:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s".encode() if minutes else f"{rest}s".encode()
