"""Checks that are taken out, and which seeded schedule notices each.

A module that lists the checks of some schedules has `REMOVALS`, and `SCHEDULES` to play: its test
is `SCHEDULES.noticed(removal, within)`, and it is a command by `SCHEDULES.tell(REMOVALS)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support.ranges import VIOLATIONS


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


def nothing(*_: object, **_named: object) -> None:
    return None


class Instead(NamedTuple):
    """What stands for `name` of `where`, a class or a module."""

    where: Any
    name: str
    by: Any


class Removal(NamedTuple):
    """What is missing at the same time: one check, or all that back one another up."""

    missing: tuple[Instead, ...]

    @property
    def name(self) -> str:
        return " + ".join(one.name for one in self.missing)


def without(*missing: Instead) -> Removal:
    return Removal(missing)


class Caught(NamedTuple):
    """The schedule that missed the check, and what went wrong in it."""

    seed: int
    problem: str


class Schedules(NamedTuple):
    """Seeded schedules, by how one is played: it raises where something does not hold."""

    play: Callable[[int], object]
    known: Mapping[str, int]
    """By a check's name, a schedule that is known to miss it: it is played before the others."""
    beside: tuple[Instead, ...] = ()
    """What stands for something else in each of them, so that it is they who notice."""

    def noticed(self, removal: Removal, within: int) -> Caught | None:
        """The first schedule that misses the check, of those that are known to and `within` more;
        None where none does.
        """
        return self._first(removal, self._likely_first(removal, within))

    def _likely_first(self, removal: Removal, within: int) -> Iterator[int]:
        yield from (self.known[one.name] for one in removal.missing if one.name in self.known)
        yield from range(within)

    def _first(self, removal: Removal, seeds: Iterable[int]) -> Caught | None:
        with ExitStack() as patched:
            for where, name, by in (*self.beside, *removal.missing):
                patched.enter_context(patch.object(where, name, by))
            for seed in seeds:
                try:
                    self.play(seed)
                except VIOLATIONS as error:
                    return Caught(seed, str(error))
        return None

    def tell(self, removals: Iterable[Removal], *, otherwise: int) -> None:
        """As a command: print the first schedule by number that misses each, of so many as its
        argument says, else `otherwise`.
        """
        limit = int(sys.argv[1]) if len(sys.argv) > 1 else otherwise
        for one in removals:
            print(f"{one.name}: {self._first(one, range(limit))}", flush=True)
