"""What a policy is asked: a request and its session as plain facts, with the turn's class."""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.messages import Arrive
from ownerserve.router.request import Request
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN, Session
from ownerserve.router.settings import Settings
from ownerserve.router.turns import classify


def ask(
    arrive: Arrive,
    session: Session | None,
    candidates: Candidates,
    *,
    limits: Settings,
    now_s: float,
) -> Request:
    """The question that `arrive` is, for those who may answer it."""
    if session is None:
        prompt_tokens = max(int(arrive.prompt_bytes / DEFAULT_BYTES_PER_TOKEN), 1)
        return Request(
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
    home, owner = session.live_home, session.live_owner
    serving = candidates.serving
    if owner is not None and owner not in serving:
        owner = None
    if home is not None and home not in serving:
        home = owner
    turns, idle_s = session.turns, now_s - session.idle_since_s
    return Request(
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
        output_tokens=int(session.output_tokens) or limits.output_tokens,
        own_pending_tokens=0 if home is None else session.pending_at(home),
        idle_s=idle_s,
        since_move_s=now_s - session.last_move_s,
        now_s=now_s,
    )
