"""This module says whether a machine was quiet enough for the demo's times to be compared."""

from __future__ import annotations

import msgspec

BUSY_LOAD = 0.75
"""A load average, for each core, from which a machine is loaded when the demo begins. `make demo`
sets up first, which leaves up to half of that on two cores."""
BUSY_SHARE = 0.1
"""The share of a machine's CPU that others may take while a policy runs."""


class MachineLoad(msgspec.Struct, frozen=True):
    """A machine's load is how many processes wanted its `cores` in the minute before the demo's
    first run, and the share of its CPU that others took in each run, in the order of runs. None:
    this system does not say."""

    cores: int
    load_average: float | None
    others_cpu_shares: tuple[float | None, ...] = ()

    @property
    def warning(self) -> str | None:
        """`warning` says in plain words that times taken here do not count, and why; None where
        nothing is known against them."""
        reasons = []
        if self.load_average is not None and self.load_average > BUSY_LOAD * self.cores:
            reasons.append(
                f"{self.load_average:.1f} processes wanted its {self.cores} cores when the demo"
                " began (load average of a minute)"
            )
        known = [share for share in self.others_cpu_shares if share is not None]
        busy = [share for share in known if share > BUSY_SHARE]
        if busy:
            reasons.append(
                f"in {len(busy)} of {len(known)} runs others took more than {BUSY_SHARE:.0%} of its"
                f" CPU, up to {max(busy):.0%}"
            )
        if not reasons:
            return None
        return (
            f"WARNING: this machine was busy with other work: {'; '.join(reasons)}. The times below"
            " are of that work too, and ratios of them, marked ?, are not to be trusted. Run the"
            " demo again where nothing else runs."
        )
