"""By how many tokens a session grows beyond its first prompt, learnt from those that ran here.

A new session has shown its first prompt alone; its seat counts for what it will hold. Of the last
sessions that began, some are over and tell it, others still grow and tell that it is more than so
much: the mean over both is the area under the survivor function of Kaplan and Meier (1958).

                    d_i over at g_i
    S(g) = prod (1 - ---------------)        growth = integral of S from 0 to the largest g
           g_i<=g   n_i that reached g_i

A session counts as over when it is, or while it is away for longer than LONGEST_GAP_S.

Owns what was seen. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ownerserve.kv.ids import SessionId

SESSIONS_KEPT = 256
OVER_LEAST = 32
"""So many sessions were over before growth is told."""
LONGEST_GAP_S = 300.0
"""A tool or a person may take so long."""


class _Seen(msgspec.Struct, gc=False):
    """A session that began with `first` tokens, holds `context`, and has no turn under way since
    `left_s`; None: one is."""

    first: int
    context: int
    left_s: float | None = None
    is_over: bool = False


class SessionGrowth:
    """The growth of the last SESSIONS_KEPT sessions that began here."""

    def __init__(self) -> None:
        self._seen: OrderedDict[SessionId, _Seen] = OrderedDict()

    def began(self, session: SessionId, prompt_tokens: int) -> None:
        """Note a turn of the session, its first or a later one."""
        known = self._seen.get(session)
        if known is None:
            self._seen[session] = _Seen(prompt_tokens, prompt_tokens)
            if len(self._seen) > SESSIONS_KEPT:
                self._seen.popitem(last=False)
            return
        known.left_s, known.is_over = None, False
        known.context = max(known.context, prompt_tokens)

    def ended(self, session: SessionId, tokens: int, now_s: float) -> None:
        """Note the end of a session's turn, with a context of `tokens` (0: not told)."""
        if (known := self._seen.get(session)) is not None:
            known.context = max(known.context, tokens)
            known.left_s = now_s

    def over(self, session: SessionId) -> None:
        """Note that the session is over."""
        if (known := self._seen.get(session)) is not None:
            known.is_over = True

    def tokens(self, now_s: float) -> float | None:
        """Return the mean growth; None while too few sessions were over."""
        before_s = now_s - LONGEST_GAP_S
        grown: dict[int, tuple[int, int]] = {}
        over = 0
        for known in self._seen.values():
            is_over = known.is_over or (known.left_s is not None and known.left_s <= before_s)
            growth = known.context - known.first
            ended, reached = grown.get(growth, (0, 0))
            grown[growth] = (ended + is_over, reached + 1)
            over += is_over
        if over < OVER_LEAST:
            return None
        mean, surviving, at_risk, before = 0.0, 1.0, len(self._seen), 0
        for growth in sorted(grown):
            mean += surviving * (growth - before)
            ended, reached = grown[growth]
            surviving *= 1.0 - ended / at_risk
            at_risk -= reached
            before = growth
        return mean
