"""How a session that others counted comes to stand in this cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ownerserve.cache.outcomes import DEFAULT_TTL_S, Install
from ownerserve.cache.tree import paths
from ownerserve.cache.tree.node import Session
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from ownerserve.cache.hetero import HeteroCache


def check_install(install: Install, block_bytes: int) -> None:
    """Raise InvalidInput for tokens that are no whole blocks, or a version that no turn made."""
    tail = len(install.open_tokens)
    if len(install.tokens) % block_bytes or tail >= block_bytes or tail % TOKEN_BYTES:
        raise InvalidInput(
            "tokens",
            f"{len(install.tokens)} bytes and {tail} open ones",
            f"give whole blocks of {block_bytes} bytes, and less than one behind them",
        )
    if install.version < 1:
        raise InvalidInput("version", f"{install.version}", "a session begins with its first turn")


def stand(cache: HeteroCache, session: Session, install: Install, *, now: float) -> None:
    """Put the session, of which no turn runs, where `install` says. Its frontier is at the deepest
    resident block of those tokens; nothing becomes resident by this."""
    blocks = len(install.tokens) // cache.tree.block_bytes
    node, depth = cache.tree.walk(install.tokens, blocks)
    stop = None
    if depth:
        stop = cache.tree.stop_at(paths.locate(node, depth), depth, now)
        cache.policy.touched(stop)
    session.version, session.sealed = install.version, blocks
    session.tokens = (len(install.tokens) + len(install.open_tokens)) // TOKEN_BYTES
    session.tail, session.tip, session.row = install.open_tokens, install.tip, None
    cache.sessions.move(session, stop, ttl_s=DEFAULT_TTL_S, now=now)
