"""Which sessions a worker that leaves stays for.

| the session is | the worker stays |
|---|---|
| its own; nobody's, as far as was heard | until the session went elsewhere |
| another's, and a turn of it ended here just now, or the worker began to leave just now | GUEST_S |
| | its owner is asked to hand it over, or brings what the turn added (gateway/rests.py) |
| another's | not for it: what is here of it is cached state |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ownerserve.cache.sessions import SessionView
from ownerserve.node.ownership.ownership import Owning

GUEST_S = 10.0
"""For so long after a turn of another's session it may become this worker's: its owner is given 2 s
to hand it over, and gateways look each 2 s where it stands, by which this worker hears of it. For
so long from its leaving on what such turns added is read by who goes on: gateways hear of that with
a probe, ask twice, and have it brought."""
NOT_LEAVING_S = float("-inf")


def ask_whose(sessions: Iterable[SessionView], ownership: Owning) -> None:
    """Ask the directory of each session that is another's whether it still is, as the worker begins
    to leave: it may be this worker's since its turn here, and nobody has told it."""
    for session in sessions:
        if session.version and _is_anothers(session, ownership):
            ownership.moved_here(session.session_id, None)


def keeps_worker(
    session: SessionView, ownership: Owning, now_s: float, *, leaves_since_s: float = NOT_LEAVING_S
) -> bool:
    """Return whether a worker stays for this session, which nothing runs of, and that it leaves
    since `leaves_since_s`; both on the cache's clock."""
    if not session.version:  # it went elsewhere, or no turn of it has ended here
        return False
    is_stay = now_s < max(session.last_s, leaves_since_s) + GUEST_S
    return is_stay or not _is_anothers(session, ownership)


class Staying:
    """`Staying` says for how long a worker stays for its sessions once it begins to leave. It owns
    since when it leaves; calls are made on the engine's thread. `now` is the cache's clock."""

    def __init__(
        self, sessions: Iterable[SessionView], ownership: Owning, now: Callable[[], float]
    ) -> None:
        self._sessions = sessions
        self._ownership = ownership
        self._now = now
        self._leaves_since_s = NOT_LEAVING_S

    def begin(self) -> None:
        """Hear that the worker begins to leave."""
        self._leaves_since_s = self._now()
        ask_whose(self._sessions, self._ownership)

    def is_wanted(self) -> bool:
        """Return whether the worker stays for any session, as far as nothing runs of it."""
        now_s, since_s = self._now(), self._leaves_since_s
        return any(
            keeps_worker(one, self._ownership, now_s, leaves_since_s=since_s)
            for one in self._sessions
        )


def _is_anothers(session: SessionView, ownership: Owning) -> bool:
    owner = ownership.owner_of(session.session_id)
    return owner is not None and owner.version is None
