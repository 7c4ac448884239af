"""How a turn is opened in the cache: as what it adds to its session, or from its whole prompt."""

from __future__ import annotations

from ownerserve.cache.continuing import append_of
from ownerserve.cache.outcomes import Begun, Refused, Turn
from ownerserve.engines.hf.scheduling.sequence import Sequence
from ownerserve.engines.hf.scheduling.step import CachePort, Intake, ResumeOf


def open_turn(
    cache: CachePort, sequence: Sequence, resume_of: ResumeOf, *, now: float
) -> Begun | Refused:
    """A prompt that begins with its session's tokens is an append: nothing of those is looked at.
    Any other one is a begin, which compares all of it."""
    turn = Turn(sequence.turn_id, sequence.session_id, sequence.packed())
    session = None if turn.session_id is None else cache.sessions.get(turn.session_id)
    if session is not None:
        append = append_of(session, turn, sequence.prompt.digest_at, layout=cache.layout)
        if append is not None:
            sequence.intake = Intake.APPEND
            return cache.append(append, now)
    sequence.intake = Intake.BEGIN
    resume = resume_of(turn.tokens)
    if resume is None:
        return cache.begin(turn, now)
    return cache.begin(turn, now, resume=resume)
