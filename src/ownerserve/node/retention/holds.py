"""Holds keep what sessions left on the device while it is copied, since others wait for its room.

    turn ends, others wait ── hold ── copied | the session is back | HOLD_S ──> over

A turn in line waits for what is held: else its blocks would be taken before a byte of them is read,
and computed again when the session comes back. A turn that runs takes the room all the same.

Owns which sessions are held; the cache owns the tickets. Pure.
"""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId

HOLD_S = 0.5
"""So long at most: a store that does not answer keeps nobody."""


class CopyHolds:
    """`CopyHolds` are the sessions of one cache that are held until they are copied."""

    def __init__(self, cache: HeteroCache) -> None:
        self._cache = cache
        self._tickets: dict[SessionId, int] = {}

    def hold(self, session_id: SessionId, now: float) -> None:
        """Keep what the session has on the device until `let`, HOLD_S at most."""
        self.let(session_id)
        tokens = self._cache.residents.tokens_of(session_id)
        self._tickets[session_id] = self._cache.lends.lend((tokens,), now, idle_s=HOLD_S)

    def let(self, session_id: SessionId) -> None:
        """Keep it no longer. One that is not held is no error."""
        ticket = self._tickets.pop(session_id, None)
        if ticket is not None:
            self._cache.lends.end(ticket)

    @property
    def any_stand(self) -> bool:
        """Whether any session is held still."""
        return any(map(self._cache.lends.stands, self._tickets.values()))

    def check(self) -> None:
        """Raise InvariantViolated unless no turn of a session that is held runs."""
        for session_id in self._tickets:
            session = self._cache.sessions.get(session_id)
            if session is not None and session.running:
                raise InvariantViolated(f"invariant 1: {session_id!r} runs, and is held")
