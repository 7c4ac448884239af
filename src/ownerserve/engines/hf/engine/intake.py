"""Taking turns in: what the engine's thread does once for each, and what CPU time that takes.

    submit ── judged, queued, its node told ──> plan ── opened in the cache ──> announced
    `──────────── counted ────────────'         `── counted, shared by those that the step opens ──'

A turn that waits for state or for room is counted for its two ends, not for the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Install
from ownerserve.engines.hf.scheduling.step import Intake, StepPlan
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.node.ownership.ownership import Owning
from ownerserve.node.vocabulary.chains import PromptPrefix


class IntakeClock:
    """CPU seconds of the calling thread, by request. `observe` is told of each turn once."""

    def __init__(self, observe: Callable[[Intake, float], None]) -> None:
        self._observe = observe
        self._since_s = 0.0
        self._spent: dict[str, float] = {}

    def start(self) -> None:
        """Something begins that is done for turns which are taken in."""
        self._since_s = time.thread_time()

    def submitted(self, request_id: str) -> None:
        """It was done for this request, which is queued now."""
        self._spent[request_id] = time.thread_time() - self._since_s

    def planned(self, plan: StepPlan) -> None:
        """It was done for what the plan opens for the first time, and for no other."""
        opened = [one for one in plan.admitted if one.request_id in self._spent]
        if opened:
            share_s = (time.thread_time() - self._since_s) / len(opened)
            for one in opened:
                self._observe(one.intake, self._spent.pop(one.request_id, 0.0) + share_s)

    def forget(self, request_id: str) -> None:
        """The request is over, or was refused."""
        self._spent.pop(request_id, None)


def take_over(
    cache: HeteroCache,
    session_id: SessionId,
    ownership: Owning,
    *,
    prompt: PromptPrefix,
    now: float,
) -> bool:
    """Bring a session to the version at which this worker owns it, where that is another than was
    counted here: others owned it before, or an earlier life of this worker. Whether it was done.

    The prompt must go on from what the directory was told last, and this cache must not be ahead
    of that. Else a later turn does it.
    """
    session, grant = cache.sessions.get(session_id), ownership.standing(session_id)
    if grant is None or session is None or grant.version == session.version:
        return False
    sealed, tip = grant.tokens // cache.layout.block_tokens, prompt.digest_at(grant.tokens)
    if (
        tip is None
        or sealed < session.sealed
        or ownership.prefix_name(tip, session_id) != grant.prefix_hash
    ):
        return False
    tail = session.tail if sealed == session.sealed and session.tip == tip else b""
    tokens = prompt.tokens[: grant.tokens * TOKEN_BYTES]
    there = Install(session_id, grant.version, tokens, tail, tip)
    return cache.install(there, now) is None
