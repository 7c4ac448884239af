"""Which sessions a worker that leaves stays for.

| the session is | the worker stays |
|---|---|
| its own; nobody's, as far as was heard | until the session went elsewhere |
| another's, and a turn of it ended here just now | GUEST_S: its owner is asked to hand it over |
| another's | not for it: what is here of it is cached state |
"""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.cache.sessions import SessionView
from ownerserve.node.ownership.ownership import Owning

GUEST_S = 6.0
"""For so long after a turn of another's session it may become this worker's: its owner is given 2 s
to hand it over, and gateways look each 2 s where it stands, by which this worker hears of it."""


def ask_whose(sessions: Iterable[SessionView], ownership: Owning) -> None:
    """Ask the directory of each session that is another's whether it still is, as the worker begins
    to leave: it may be this worker's since its turn here, and nobody has told it."""
    for session in sessions:
        if session.version and _is_anothers(session, ownership):
            ownership.moved_here(session.session_id, None)


def keeps_worker(session: SessionView, ownership: Owning, now_s: float) -> bool:
    """Return whether a worker that leaves stays for this session, which nothing runs of; `now_s` is
    on the cache's clock."""
    if not session.version:  # it went elsewhere, or no turn of it has ended here
        return False
    return not _is_anothers(session, ownership) or now_s < session.last_s + GUEST_S


def _is_anothers(session: SessionView, ownership: Owning) -> bool:
    owner = ownership.owner_of(session.session_id)
    return owner is not None and owner.version is None
