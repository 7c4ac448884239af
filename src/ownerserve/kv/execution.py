"""This module tells what came of a turn's prompt, by three counts of tokens. Pure; the same rule
everywhere.

Worker, gateway and simulator each know these counts in their own way and ask here for the name:

    known     of the prompt, what the session's last turn left: it could all be at hand
    cached    of the prompt, what was at hand when the turn began, what was brought included
    brought   of `cached`, what came from a tier below or from a peer

    known      |───────────────────────────────|
    cached     |──────────────────|                 lost = known - cached
    brought             |─────────|

`known` says what the *session* left. A prefix that others left too (a system prompt) may be cached
without it, and does not hide that the session's own state is gone.
"""

from __future__ import annotations

from ownerserve.kv.messages import ExecutionMode


def lost_tokens(known: int, cached: int) -> int:
    """Count the tokens that the session's last turn left and that must be computed again."""
    return max(0, known - cached)


def execution_mode(known: int, cached: int, brought: int) -> ExecutionMode:
    """Return the mode of a turn that ran where its prompt was computed.

    Any loss makes a known session's turn a reseed, unless more was brought than was lost. A turn
    that was moved or prefilled elsewhere is named by whoever did that.
    """
    lost = lost_tokens(known, cached)
    if brought > lost:
        return ExecutionMode.FETCH
    if lost:
        return ExecutionMode.RESEED
    if known:
        return ExecutionMode.DIRECT_APPEND
    return ExecutionMode.SEED if cached else ExecutionMode.COLD_PREFILL
