"""A workload is a trace as the simulator's load: closed loop, open loop or capped sessions."""

from ownerserve.sim.workload.driver import ReleaseKey, WorkloadDriver
from ownerserve.sim.workload.shape import (
    Capped,
    Closed,
    First,
    Open,
    OutputReuse,
    Poisson,
    Recorded,
    Sample,
    SharedHeads,
    TopShare,
    WorkloadShape,
    Zipf,
)

__all__ = [
    "Capped",
    "Closed",
    "First",
    "Open",
    "OutputReuse",
    "Poisson",
    "Recorded",
    "ReleaseKey",
    "Sample",
    "SharedHeads",
    "TopShare",
    "WorkloadDriver",
    "WorkloadShape",
    "Zipf",
]
