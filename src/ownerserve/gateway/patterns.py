"""Patterns are how the turns of each session were served, so that two classes of sessions show:
some that always go on from what they left, and some that never do (seed 003, v3).

    session a   seed append append append append     4 of 4 later turns kept
    session b   seed reseed reseed cold reseed       0 of 4, a run of 4: it starves

Of the sessions seen last, KNOWN_MAX. A session's first turn has nothing to go on from, and counts
for nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode

KNOWN_MAX = 4096
LATER_LEAST = 4
"""A session of fewer later turns says nothing of a pattern."""
KEPT = frozenset({ExecutionMode.DIRECT_APPEND, ExecutionMode.FETCH, ExecutionMode.MIGRATE})
"""Modes in which a turn went on from what its session had left."""
BANDS = ("0", "0-25", "25-50", "50-75", "75-100", "100")
"""Shares of a session's later turns, in percent: none, between two edges, or all."""


class SessionPattern(msgspec.Struct):
    """A session's pattern: its later turns by mode, how many in a row did not go on from what it
    had left, now and at most, and what its turns waited for their first byte."""

    modes: Counter[ExecutionMode] = msgspec.field(default_factory=Counter)
    later: int = 0
    kept: int = 0
    lost_run: int = 0
    longest_lost_run: int = 0
    first_byte_s: float = 0.0

    @property
    def band(self) -> str:
        """Return the band of the share of later turns that were kept."""
        if self.kept in (0, self.later):
            return BANDS[-1] if self.kept else BANDS[0]
        return BANDS[1 + 4 * self.kept // self.later]


class SessionPatterns:
    """The patterns of the sessions that were served last."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[SessionId, SessionPattern] = OrderedDict()

    def ran(self, session: SessionId, mode: ExecutionMode, first_byte_s: float) -> None:
        """Note a turn of the session whose answer is whole."""
        pattern = self._by_session.get(session)
        if pattern is None:
            self._by_session[session] = SessionPattern()
            if len(self._by_session) > KNOWN_MAX:
                self._by_session.popitem(last=False)
            return
        self._by_session.move_to_end(session)
        pattern.modes[mode] += 1
        pattern.later += 1
        pattern.first_byte_s += first_byte_s
        if mode in KEPT:
            pattern.kept += 1
            pattern.lost_run = 0
        else:
            pattern.lost_run += 1
            pattern.longest_lost_run = max(pattern.longest_lost_run, pattern.lost_run)

    @property
    def told(self) -> Mapping[SessionId, SessionPattern]:
        """Return the patterns of sessions that had turns enough for one."""
        known = self._by_session.items()
        return {name: one for name, one in known if one.later >= LATER_LEAST}

    def bands(self) -> dict[str, int]:
        """Return how many sessions there are in each band."""
        found = Counter(one.band for one in self.told.values())
        return {band: found[band] for band in BANDS}

    def longest_lost_run(self) -> int:
        """Return how many turns in a row a session has now been served without what it had left,
        where that are most."""
        return max((one.lost_run for one in self._by_session.values()), default=0)

    def worst(self, count: int) -> list[tuple[SessionId, SessionPattern]]:
        """Return the sessions that starved most: by turns in a row, then by share."""

        def order(item: tuple[SessionId, SessionPattern]) -> tuple[float, float]:
            return -item[1].longest_lost_run, item[1].kept / item[1].later

        lost = [item for item in self.told.items() if item[1].longest_lost_run]
        return sorted(lost, key=order)[:count]
