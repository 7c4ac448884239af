"""A worker's two names: the gateway's, the address where it reaches it, and its own, known to the
directory and to its peers. Owns which life has which.
"""

from __future__ import annotations

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit

Life = tuple[Incarnation, int]


class Lives:
    """Lives of routing units that answer: when one began, to the nanosecond, and its rank say which
    one it is, under whatever name."""

    def __init__(self) -> None:
        self._here: dict[Life, RoutingUnit] = {}
        self._own_names: dict[Life, WorkerId] = {}

    def up(self, unit: RoutingUnit, own_name: str | None) -> None:
        """A worker answers; `own_name`: what it calls itself, where it says so."""
        life = unit.incarnation, unit.dp_rank
        self._here[life] = unit
        if own_name is not None:
            self._own_names[life] = WorkerId(own_name)

    def down(self, worker: str) -> None:
        """A worker is silent."""
        for life in [life for life, unit in self._here.items() if unit.worker == worker]:
            del self._here[life]
            self._own_names.pop(life, None)

    def here(self, unit: RoutingUnit) -> RoutingUnit:
        """The unit as this gateway names it."""
        return self._here.get((unit.incarnation, unit.dp_rank), unit)

    def to_workers(self, unit: RoutingUnit) -> RoutingUnit | None:
        """The unit as the directory and its peers name it; None: it never said."""
        name = self._own_names.get((unit.incarnation, unit.dp_rank))
        return None if name is None else RoutingUnit(name, unit.dp_rank, unit.incarnation)
