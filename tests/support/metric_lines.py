"""What a process's metrics say, as text: the sum of a metric's samples."""

from __future__ import annotations

_ENDS_NAME = (" ", "{", ",", "}")
"""What may follow what was asked for: another metric's name may begin with it."""


def summed(text: str, start: str) -> float:
    """Return the sum of the samples of the metric `start`, a name or a name with its first labels.

    `text` is in Prometheus' text format; a metric with no sample is 0.
    """
    found = (line for line in text.splitlines() if line.startswith(start))
    own = (line for line in found if line[len(start) :].startswith(_ENDS_NAME))
    return sum(float(line.rpartition(" ")[2]) for line in own)
