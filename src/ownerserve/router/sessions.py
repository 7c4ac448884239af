"""What the router remembers of each session, in bounded memory.

Owns: where a session's state lies (`owner`), how many bytes its tokens take, how much of it the
owner has seen. Losing an entry costs a cache hit, never a right answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.fleet import Fleet
from ownerserve.router.usage import Usage

DEFAULT_BYTES_PER_TOKEN = 4.0
"""Until a session has shown its own ratio (English text and code lie between 3 and 5)."""

SESSIONS_MAX = 100_000


class Session:
    """One session. `owner` is where it ran last; None when that worker is gone."""

    __slots__ = ("bytes_per_token", "extent_tokens", "owner", "seen_at_s", "turns")

    def __init__(self, now: float) -> None:
        self.owner: WorkerId | None = None
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        self.extent_tokens = 0
        self.seen_at_s = now
        self.turns = 0

    def learn(self, usage: Usage, *, prompt_bytes: int) -> None:
        """A finished turn: its ratio, and the context that its worker now holds."""
        if usage.prompt_tokens > 0 and prompt_bytes > 0:
            self.bytes_per_token = prompt_bytes / usage.prompt_tokens
        self.extent_tokens = usage.prompt_tokens + usage.output_tokens


class SessionTable:
    """Sessions by id, least recently used first; at most `limit`, none idle for over `idle_s`.

    Owns the binding on both sides: `session.owner` and the fleet's `worker.sessions`.
    """

    def __init__(self, fleet: Fleet, *, limit: int = SESSIONS_MAX, idle_s: float = 4 * 3600.0):
        self._fleet = fleet
        self._limit = limit
        self._idle_s = idle_s
        self._sessions: dict[SessionId, Session] = {}
        self._aliases: dict[SessionId, SessionId] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> Iterator[tuple[SessionId, Session]]:
        return iter(self._sessions.items())

    def resolve(self, session: SessionId) -> SessionId:
        """The session that a response alias stands for; any other name is its own."""
        return self._aliases.get(session, session)

    def get(self, session: SessionId) -> Session | None:
        return self._sessions.get(session)

    def touch(self, session: SessionId, now: float) -> Session:
        """The session, made when it is new, now the most recently used."""
        known = self._sessions.pop(session, None)
        if known is None:
            self._make_room(now)
            known = Session(now)
        self._sessions[session] = known
        known.seen_at_s = now
        return known

    def bind(self, session: SessionId, worker: WorkerId) -> None:
        """`worker` is where the session runs now; what another held of it no longer counts."""
        known = self._sessions[session]
        if known.owner == worker:
            return
        if known.owner is not None:
            self._fleet[known.owner].sessions.discard(session)
        known.owner = worker
        known.extent_tokens = 0
        self._fleet[worker].sessions.add(session)

    def alias(self, alias: SessionId, session: SessionId) -> None:
        """Let `alias` mean `session`."""
        if alias != session:
            while len(self._aliases) >= self._limit:
                del self._aliases[next(iter(self._aliases))]
            self._aliases[alias] = session

    def drop_bindings(self, worker: WorkerId) -> None:
        """The worker is gone with all it held; its sessions keep their ratio."""
        held = self._fleet[worker].sessions
        for session in held:
            known = self._sessions[session]
            known.owner, known.extent_tokens = None, 0
        held.clear()

    def forget(self, session: SessionId) -> None:
        known = self._sessions.pop(session, None)
        if known is not None and known.owner is not None:
            self._fleet[known.owner].sessions.discard(session)

    def _make_room(self, now: float) -> None:
        """Drop from the old end: one entry when full, two a call when expired (so it drains)."""
        if len(self._sessions) >= self._limit:
            self.forget(next(iter(self._sessions)))
        for _ in range(2):
            oldest = next(iter(self._sessions.items()), None)
            if oldest is None or now - oldest[1].seen_at_s <= self._idle_s:
                return
            self.forget(oldest[0])
