"""The lives of workers that the gateway speaks for, and their leases at the directory. Pure.

a probe or a stamp tells of a life --> to be registered --Leased--> renewed while it answers
a later life of it, or silence     --> not renewed any more: its lease runs out
the directory has forgotten us     --> all are registered anew
"""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.kv.epoch import Epoch, Term
from ownerserve.kv.messages import RoutingUnit

REGISTER_AGAIN_S = 1.0
"""After a registration that was not answered."""


class Leases:
    """One life of each routing unit at most."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], RoutingUnit] = {}
        self._to_register: dict[RoutingUnit, float] = {}
        """Lives whose lease the directory has not confirmed, and when each is asked for next."""
        self._memory: dict[RoutingUnit, Term | None] = {}
        """The directory's when it confirmed, of the others."""

    def __len__(self) -> int:
        return len(self._lives)

    def sees(self, unit: RoutingUnit) -> bool:
        """Whether this life answers."""
        return self._lives.get((unit.worker, unit.dp_rank)) == unit

    def is_known(self, unit: RoutingUnit) -> bool:
        """Whether the directory has registered this life, as far as we know."""
        return self.sees(unit) and unit not in self._to_register

    def lives(self, unit: RoutingUnit) -> None:
        """A worker answers, in this life."""
        known = self._lives.get((unit.worker, unit.dp_rank))
        if known is None or unit.incarnation > known.incarnation:
            if known is not None:
                self._drop(known)
            self._lives[unit.worker, unit.dp_rank] = unit
            self._to_register[unit] = 0.0

    def silent(self, worker: str) -> None:
        """A worker is down."""
        for place in [place for place in self._lives if place[0] == worker]:
            self._drop(self._lives.pop(place))

    def leased(self, unit: RoutingUnit, memory: Term | None) -> None:
        """The directory has registered it."""
        if self.sees(unit):
            self._to_register.pop(unit, None)
            self._memory[unit] = memory

    def forgotten(self) -> None:
        """The directory knows none of them any more."""
        self._to_register = dict.fromkeys(self._lives.values(), 0.0)

    def registrations(self, seen: Epoch | None, now_s: float) -> list[ask.Register]:
        """Those that are due."""
        due = [unit for unit, at_s in self._to_register.items() if now_s >= at_s]
        for unit in due:
            self._to_register[unit] = now_s + REGISTER_AGAIN_S
        return [ask.Register(unit, seen) for unit in due]

    def renewals(self, seen: Epoch | None) -> list[ask.RenewLease]:
        """One for each that is registered."""
        return [
            ask.RenewLease(unit, seen, self._memory[unit])
            for unit in self._lives.values()
            if unit not in self._to_register
        ]

    def _drop(self, unit: RoutingUnit) -> None:
        self._to_register.pop(unit, None)
        self._memory.pop(unit, None)
