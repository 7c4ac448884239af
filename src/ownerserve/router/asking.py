"""This module makes the question that a policy is asked about a turn, from what is known of its
session."""

from __future__ import annotations

from ownerserve.router.decision import RoutingRequest, classify
from ownerserve.router.fleet import Candidates
from ownerserve.router.messages import Arrive
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN, RoutedSession
from ownerserve.router.settings import Settings


def ask(
    arrive: Arrive,
    session: RoutedSession | None,
    candidates: Candidates,
    *,
    limits: Settings,
    now_s: float,
) -> RoutingRequest:
    """Make the question that the policy is asked about `arrive`, as of `now_s`, for these
    candidates."""
    if session is None:
        prompt_tokens = max(int(arrive.prompt_bytes / DEFAULT_BYTES_PER_TOKEN), 1)
        return RoutingRequest(
            prompt_tokens=prompt_tokens,
            turn=classify(
                turns=0, known_tokens=0, new_tokens=prompt_tokens, is_cold=False, limits=limits
            ),
            output_tokens=limits.output_tokens,
            now_s=now_s,
        )
    prompt_tokens = int(arrive.prompt_bytes / session.bytes_per_token) or 1
    prefix = session.prefix
    if prefix is not None:
        known_tokens = prefix.tokens
    else:
        prefix, known_tokens = session.stem, session.stem_tokens
    if known_tokens >= prompt_tokens:
        known_tokens = prompt_tokens - 1  # the last one is always computed
    home, owner = session.home, session.owner
    serving = candidates.serving  # who is up; when nobody is, who may be
    if owner is not None and (owner.life != session.owner_life or owner not in serving):
        owner = None
    if home is None or home.life != session.home_life or home not in serving:
        home = owner
    turns, idle_s = session.turns, now_s - session.idle_since_s
    return RoutingRequest(
        prompt_tokens=prompt_tokens,
        session=arrive.session,
        turn=classify(
            turns=turns,
            known_tokens=known_tokens,
            new_tokens=prompt_tokens - known_tokens,
            is_cold=home is None or idle_s > limits.cold_after_s,
            limits=limits,
        ),
        turns=turns,
        home=home,
        owner=owner,
        copies=session.copies(),
        spec_digest="" if prefix is None else prefix.spec_digest,
        known_tokens=known_tokens,
        is_emptied=home is not None and session.emptied is home,
        output_tokens=int(session.output_tokens) or limits.output_tokens,
        own_pending_tokens=0 if home is None else session.pending_at(home),
        idle_s=idle_s,
        since_move_s=now_s - session.last_move_s,
        now_s=now_s,
    )
