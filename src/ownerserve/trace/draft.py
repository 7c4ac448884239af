"""This module puts sessions together in any order: drafts are requests whose `after` still holds
draft numbers.

Readers and generators make drafts agent by agent; a session lists them by start.
"""

from __future__ import annotations

import msgspec

from ownerserve.trace.model import TraceRequest


def end_s(draft: TraceRequest) -> float:
    """Return when the draft's answer was complete, if that was recorded; else its start."""
    return draft.start_s + (draft.api_s or 0.0)


def settle(drafts: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return the drafts in order of start, `after` renumbered to positions.

    Each draft's waits must be drafted before it and start no later; then they also come before
    it here, since the sort is stable.
    """
    order = sorted(range(len(drafts)), key=lambda number: drafts[number].start_s)
    position = {number: place for place, number in enumerate(order)}
    settled = []
    for number in order:
        draft = drafts[number]
        if draft.after is not None:
            after = tuple(sorted(position[wait] for wait in draft.after))
            draft = msgspec.structs.replace(draft, after=after)
        settled.append(draft)
    return tuple(settled)
