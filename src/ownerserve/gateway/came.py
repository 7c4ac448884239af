"""What came of a turn's prompt: the worker's word where it gives one, else the counts in `usage`.

Pure.
"""

from __future__ import annotations

import msgspec

from ownerserve.gateway.stamps import Stamp
from ownerserve.kv.execution import execution_mode, lost_tokens
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.requests.body import Usage

BLOCK_TOKENS_MAX = 528
"""A plain engine does not tell its blocks. Most of vLLM's have 16 tokens, those of hybrids with
recurrent state 528 (vLLM #40696); where they are longer, rounding may be called a loss."""


class Came(msgspec.Struct, frozen=True, gc=False):
    """What came of a prompt. `mode` None: nobody can say."""

    mode: ExecutionMode | None = None
    lost_tokens: int = 0


def what_came(stamp: Stamp, usage: Usage | None, last_prompt: int) -> Came:
    """`last_prompt`: tokens of the session's last prompt by the gateway's own table; 0: no turn
    was counted.

    A worker that says its mode has compared the prompt itself. Of a plain engine the counts
    decide. The last answer does not count, because many clients leave its reasoning out: that it
    was lost is not seen. A prompt shorter than the last one is an edited history, which loses
    nothing.
    """
    if stamp.mode is not None:
        return Came(stamp.mode, stamp.lost_tokens)
    if usage is None or not usage.tells_cached:
        return Came()
    known, cached = last_prompt, usage.cached_tokens
    if usage.prompt_tokens < last_prompt or lost_tokens(known, cached) < _rounding(cached):
        known = min(known, cached)
    return Came(execution_mode(known, cached, 0), lost_tokens(known, cached))


def _rounding(cached: int) -> int:
    """Tokens below which nothing need be lost: engines keep whole blocks, and one that speculates
    gives up the last of them. What is cached is one block at least."""
    return 2 * min(cached or BLOCK_TOKENS_MAX, BLOCK_TOKENS_MAX)
