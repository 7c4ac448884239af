"""A trace as the simulator's load: closed loop, open loop or capped sessions."""

from ownerserve.sim.workload.driver import Key, Workload
from ownerserve.sim.workload.shape import (
    Capped,
    Closed,
    First,
    Open,
    OutputReuse,
    Poisson,
    Recorded,
    Sample,
    Shape,
    SharedHeads,
    TopShare,
    Zipf,
)

__all__ = [
    "Capped",
    "Closed",
    "First",
    "Key",
    "Open",
    "OutputReuse",
    "Poisson",
    "Recorded",
    "Sample",
    "Shape",
    "SharedHeads",
    "TopShare",
    "Workload",
    "Zipf",
]
