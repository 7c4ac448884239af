"""Whether a prompt goes on from its session: by the digest of what the session left, in O(1).

    session   |======= sealed =======|- tail -|          tip: the digest of the sealed blocks
    prompt    |=======================--------+++++|     its digest at that depth is the tip, the
                                                         tail follows: what is added is the suffix

Equal digests mean equal tokens (kv.prefix), so nothing of what is sealed is compared again.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import Append, Turn
from ownerserve.cache.tree.node import Session
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import TOKEN_BYTES

DigestAt = Callable[[int], PrefixHash | None]


def append_of(
    session: Session, turn: Turn, digest_at: DigestAt, *, layout: Layout
) -> Append | None:
    """`turn` as what it adds to its session; None when its history was edited, or when not all
    that the session left is at hand. `digest_at`: the digest of the turn's first n tokens."""
    known, sealed = session.tokens * TOKEN_BYTES, session.sealed
    sealed_tokens, stop = sealed * layout.block_tokens, session.stop
    if not session.version or len(turn.tokens) <= known:
        return None
    if sealed and (session.tip is None or digest_at(sealed_tokens) != session.tip):
        return None
    if sealed and (stop is None or stop.depth < sealed):
        return None
    if stop is not None and layout.point_names and not stop.is_complete:
        return None
    if not turn.tokens.startswith(session.tail, sealed_tokens * TOKEN_BYTES):
        return None
    return Append(
        turn.turn_id,
        session.session_id,
        session.version,
        turn.tokens[known:],
        turn.priority,
        turn.ttl_s,
    )
