"""A task is a session as a whole: its time, what of it was waiting for tools, its outcome.

A session's time is cut in two without overlap: *LLM* while at least one of its turns is in the
system, *tool* while none is. Sub-agents of one session therefore never count twice.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.metrics.samples import Samples

Floats = NDArray[np.float64]


ROWS_AT_ONCE = 65_536
"""So many rows are numbers of Python's at a time: of a million turns all would be 200 MB."""


class GapColumns(NamedTuple):
    """The gaps are the times in which a session had no turn in the system; `worker` served the turn
    before."""

    from_s: Floats
    until_s: Floats
    worker: NDArray[np.int64]


class Tasks(NamedTuple):
    """The tasks have a row a session, in order of its index. `good`: every turn was served
    whole."""

    session: NDArray[np.int64]
    from_s: Floats
    until_s: Floats
    tool_s: Floats
    retry_s: Floats
    good: NDArray[np.bool_]
    gaps: GapColumns

    @property
    def e2e_s(self) -> Floats:
        """The seconds from a session's first arrival to its last end."""
        return self.until_s - self.from_s


def tasks(table: NDArray[Any]) -> Tasks:
    """Return the tasks of the turns in `table`; a session that still runs counts what ended of
    it."""
    rows = table[np.lexsort((table["arrived_s"], table["session"]))]
    sessions, starts = np.unique(rows["session"], return_index=True)
    if not len(sessions):
        none, nobody = np.zeros(0), np.zeros(0, np.int64)
        gaps = GapColumns(none, none, nobody)
        return Tasks(nobody, none, none, none, none, np.zeros(0, np.bool_), gaps)
    gaps, tool_s = _gaps(rows, starts)
    again = (rows["attempts"] > 1) | (rows["client_retries"] > 0)
    retried = np.where(again, rows["routed_s"] - rows["arrived_s"], 0.0)
    whole = np.isin(rows["mode"], SERVED) & (rows["output_tokens"] >= rows["wanted_tokens"])
    return Tasks(
        sessions.astype(np.int64),
        rows["arrived_s"][starts],
        np.maximum.reduceat(rows["done_s"], starts),
        tool_s,
        np.add.reduceat(retried, starts),
        np.logical_and.reduceat(whole, starts),
        gaps,
    )


def _gaps(rows: NDArray[Any], starts: NDArray[np.intp]) -> tuple[GapColumns, Floats]:
    """Return all gaps, and how long those of each session are together.

    `rows` are in order of session, then of arrival; a session's begin at its `starts`.
    """
    from_s, until_s, worker = array("d"), array("d"), array("q")
    counts = [0] * len(starts)
    session, latest_s, holder = -1, 0.0, 0
    following = iter((*starts.tolist(), len(rows)))
    begins = next(following)
    for low in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[low : low + ROWS_AT_ONCE]
        columns = (part[name].tolist() for name in ("arrived_s", "done_s", "worker"))
        for at, (arrived_s, done_s, served_by) in enumerate(zip(*columns, strict=True), low):
            if at == begins:
                begins, session = next(following), session + 1
                latest_s, holder = done_s, served_by
                continue
            if arrived_s > latest_s:
                from_s.append(latest_s)
                until_s.append(arrived_s)
                worker.append(holder)
                counts[session] += 1
            if done_s > latest_s:  # the first turn that ends last before the gap
                latest_s, holder = done_s, served_by
    gaps = GapColumns(np.array(from_s), np.array(until_s), np.array(worker, dtype=np.int64))
    ends = np.cumsum(counts)
    lengths = gaps.until_s - gaps.from_s
    tool_s = [
        float(lengths[end - count : end].sum()) if count else 0.0
        for count, end in zip(counts, ends.tolist(), strict=True)
    ]
    return gaps, np.array(tool_s)


def tool_idle_utilisation(gaps: GapColumns, samples: Samples) -> float | None:
    """Return the share of the time in tool gaps in which the worker that holds a session's state
    computed for others.

    None without gaps or samples.
    """
    times, busy = samples.times_s(), samples.column("busy_s")
    known = gaps.worker >= 0
    total = float((gaps.until_s - gaps.from_s)[known].sum())
    if len(times) < 2 or not total:
        return None
    used = 0.0
    for worker in np.unique(gaps.worker[known]):
        here = gaps.worker == worker
        course = busy[:, worker]
        spent = np.interp(gaps.until_s[here], times, course)
        used += float((spent - np.interp(gaps.from_s[here], times, course)).sum())
    return used / total
