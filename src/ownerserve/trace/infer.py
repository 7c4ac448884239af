"""This module infers sessions for traces that have none, from what each request re-uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ownerserve.trace.model import TraceRequest
from ownerserve.trace.runs import expand

RARE_REQUESTS = 8
RARE_SHARE = 0.005


def infer_sessions(requests: Sequence[TraceRequest]) -> list[int]:
    """Return a session number for each of `requests`, which are in order of arrival.

    A request joins the session that last touched its deepest known block, if fewer than
    max(8, 0.5 %) of all requests use that block (a block that many use is a shared head, not a
    conversation); else it opens a session.
    """
    uses: Counter[int] = Counter()
    for request in requests:
        uses.update(expand(request.runs))
    rare = max(RARE_REQUESTS, RARE_SHARE * len(requests))
    last_touch: dict[int, int] = {}
    sessions: list[int] = []
    opened = 0
    for request in requests:
        blocks = list(expand(request.runs))
        deepest = next((block for block in reversed(blocks) if block in last_touch), None)
        if deepest is not None and uses[deepest] < rare:
            session = last_touch[deepest]
        else:
            session = opened
            opened += 1
        last_touch.update(dict.fromkeys(blocks, session))
        sessions.append(session)
    return sessions
