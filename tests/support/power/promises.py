"""What had been acknowledged at a point of a recording, read from the notes of its lives.

try WHERE n...      from here on either answer is right for what this step changes
done WHERE n -m...  n is stored, m is gone: acknowledged
stands WHERE n...   what a life found when it opened: settles what a kill left untold
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.power.trace import Event, Note


class Promise(NamedTuple):
    """A promise says which records must stand and which must not; of others either is right."""

    stored: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()


class BrokenByKill(AssertionError):
    """A kill -9 alone, without a power cut, lost or brought back what was acknowledged."""


class Promises:
    """Promises follow one place (a tier, or the term file) through a recording."""

    def __init__(self, where: str, events: Sequence[Event]) -> None:
        self._where = where
        self._starts, self._promises = [0], [Promise()]
        self._now: dict[int, bool | None] = {}
        self._tried: tuple[int, frozenset[int]] | None = None
        for stamp, event in enumerate(events):
            if isinstance(event, Note):
                what, place, *words = event.text.split()
                if place == where:
                    self._take(stamp, what, [int(word) for word in words])

    def at(self, cut: int) -> Promise:
        """Return what was promised when `cut` events had happened."""
        return self._promises[bisect_right(self._starts, cut) - 1]

    def _take(self, stamp: int, what: str, numbers: list[int]) -> None:
        if what == "try":
            self._tried = stamp, frozenset(numbers)
            return
        begun, tried = self._tried or (stamp, frozenset[int]())
        if what == "stands":
            changed = self._untold(frozenset(numbers)) if self._tried else frozenset()
            self._untold_must_be_empty(frozenset(numbers), changed | tried)
            settled: dict[int, bool | None] = dict.fromkeys(changed | tried)
        else:
            settled = {abs(number): number > 0 for number in numbers}
            for number in tried - settled.keys():
                settled[number] = True if self._now.get(number) else None
        self._turn(begun + 1, dict.fromkeys(settled))
        self._turn(stamp + 1, settled)
        self._tried = None

    def _untold(self, standing: frozenset[int]) -> frozenset[int]:
        return frozenset(n for n, stored in self._now.items() if stored and n not in standing)

    def _untold_must_be_empty(self, standing: frozenset[int], either: frozenset[int]) -> None:
        lost = self._untold(standing) - either
        back = {n for n in standing - either if self._now.get(n) is False}
        if lost or back:
            raise BrokenByKill(f"{self._where}: lost {sorted(lost)}, came back {sorted(back)}")

    def _turn(self, start: int, changes: dict[int, bool | None]) -> None:
        self._now |= changes
        self._starts.append(start)
        self._promises.append(
            Promise(
                frozenset(n for n, stored in self._now.items() if stored),
                frozenset(n for n, stored in self._now.items() if stored is False),
            )
        )
