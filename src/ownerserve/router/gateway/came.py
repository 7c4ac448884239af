"""What came of a turn's prompt: the worker's word where it gives one, else the counts in `usage`.

Owns the names of the two header lines that say it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ownerserve.kv.execution import execution_mode, lost_tokens
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.gateway.stamps import number
from ownerserve.router.usage import Usage

GRAIN_TOKENS = 1024
"""A plain engine does not tell where it keeps state: a smaller loss may be rounding."""

_MODES = {mode.value.encode(): mode for mode in ExecutionMode}


class Came(msgspec.Struct, frozen=True, gc=False):
    """What came of a prompt. `mode` None: nobody can say."""

    mode: ExecutionMode | None = None
    lost_tokens: int = 0


def what_came(headers: Mapping[bytes, bytes], usage: Usage | None, known: int) -> Came:
    """`known`: tokens that the session's last turn left by the gateway's own table.

    A worker that says its mode has compared the prompt itself. Of a plain engine the counts
    decide; a prompt shorter than what was known is an edited history, which loses nothing.
    """
    told = _MODES.get(headers.get(b"mode", b""))
    if told is not None:
        return Came(told, number(headers, b"lost-tokens") or 0)
    if usage is None or not usage.tells_cached:
        return Came()
    if usage.prompt_tokens < known or lost_tokens(known, usage.cached_tokens) < GRAIN_TOKENS:
        known = min(known, usage.cached_tokens)
    lost = lost_tokens(known, usage.cached_tokens)
    return Came(execution_mode(known, usage.cached_tokens, 0), lost)
