"""A session that is owned here was counted elsewhere: its next turn brings this cache to where its
owners left it.
"""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Install
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.node.ownership.ownership import Owning
from ownerserve.node.vocabulary.chains import PromptPrefix


def take_over(
    cache: HeteroCache,
    session_id: SessionId,
    ownership: Owning,
    *,
    prompt: PromptPrefix,
    now: float,
) -> bool:
    """Bring a session to the version at which this worker owns it, where that is another than was
    counted here: others owned it before, or an earlier life of this worker. Return whether it was
    done.

    The prompt must go on from what the directory was told last, and this cache must not be ahead
    of that. Else a later turn does it. Of a fork that no owner finished a turn of (version 0, on
    its parent's prefix) there is nothing to take over.
    """
    session, grant = cache.sessions.get(session_id), ownership.standing(session_id)
    if grant is None or session is None or grant.version in (0, session.version):
        return False
    sealed, tip = grant.tokens // cache.layout.block_tokens, prompt.digest_at(grant.tokens)
    if (
        tip is None
        or sealed < session.sealed
        or ownership.prefix_name(tip, session_id) != grant.prefix_hash
    ):
        return False
    tail = session.tail if sealed == session.sealed and session.tip == tip else b""
    tokens = prompt.tokens[: grant.tokens * TOKEN_BYTES]
    there = Install(session_id, grant.version, tokens, tail, tip)
    return cache.install(there, now) is None
