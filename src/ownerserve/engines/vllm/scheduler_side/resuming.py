"""Resuming says where a request goes on that a scheduler of ours is about to admit: at vLLM's own
hit, beyond it on full attention's KV alone, or by a replay. What is cheapest the node decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ownerserve.cache.outcomes import Replay
from ownerserve.engines.vllm.replay.replays import Replays, ResumeAt
from ownerserve.engines.vllm.turns.turn import TrackedRequest
from ownerserve.kv.ids import TurnId
from ownerserve.node.hosted_state import HostedNodeState

log = logging.getLogger("vllm.ownerserve")

WORKERS_S = 1.0
"""How long first requests wait for workers to say whether they can take part in replays."""


class ResumingSide(Protocol):
    """A `ResumingSide` is the scheduler's side, as far as `Resuming` needs it."""

    @property
    def state(self) -> HostedNodeState:
        """Return the node that plans."""

    def switch_off(self) -> None:
        """Serve no request any more."""


class Resuming:
    """A `Resuming` answers one engine core's scheduler, before it asks the connector what can be
    brought. Owns nothing: turns are the scheduler side's, running replays are `Replays`'."""

    def __init__(
        self,
        side: ResumingSide,
        turns: Mapping[TurnId, TrackedRequest],
        *,
        replays: Replays,
        block_tokens: int,
        ask: Callable[[TrackedRequest, int, int], None],
    ) -> None:
        """Make it; `ask` lets the node decide on a turn, given vLLM's hit and what range state it
        has."""
        self._side = side
        self._turns = turns
        self._replays = replays
        self._block = block_tokens
        self._ask = ask
        self._waits_from_s: float | None = None

    def at(self, request: Any, hit: int, *, resident: int, may_replay: bool) -> ResumeAt | None:
        """Return where a request goes on that has vLLM's own hit up to `hit` and full attention's
        KV up to `resident`; None: at that hit, or at what the connector says next."""
        try:
            return self._at(request, hit, resident if may_replay else hit, may_replay=may_replay)
        except Exception:  # the root of this hook: the engine goes on without us
            log.exception("OwnerServe is switched off; please report this")
            self._side.switch_off()
            return None

    def keeps(self, request_id: str, resume: ResumeAt) -> bool:
        """Return whether vLLM was told just now that the request goes on so."""
        turn = self._turns.get(TurnId(request_id))
        return turn is not None and turn.is_promised and turn.resume == resume

    def waits(self) -> bool:
        """Return whether a request is to wait until workers have said what they can do: they do
        after the first step."""
        if not self._replays.is_unknown:
            return False
        now = time.monotonic()
        if self._waits_from_s is None:
            self._waits_from_s = now
        return now - self._waits_from_s < WORKERS_S

    def plan(self) -> None:
        """Let the node plan with replays, if there are any."""
        if self._replays.is_on and self._replays.planner is not None:
            self._side.state.use(self._replays.planner)

    def _at(self, request: Any, hit: int, resident: int, *, may_replay: bool) -> ResumeAt | None:
        turn = self._turns.get(TurnId(request.request_id))
        if turn is None or not self._replays.is_on:
            return None
        self._ask(turn, hit, resident)
        turn.is_asked = True
        if turn.prompt is None:
            return None  # not hashed yet: the connector lets it wait
        resume = self._beyond(turn, hit, resident)
        if resume is not None and (may_replay or resume.start == resume.hit):
            turn.resume, turn.window_hit = resume, 0
            self._replays.begin(request.request_id, resume)
        return turn.resume

    def _beyond(self, turn: TrackedRequest, hit: int, resident: int) -> ResumeAt | None:
        """Return where the turn goes on beyond vLLM's own hit, if it is not as ever."""
        turn_id, block = TurnId(turn.request.request_id), self._block
        if turn.offer > hit:
            local = max(0, min(resident // block * block, turn.offer - block))
            resume = ResumeAt(turn.start, local, turn.offer)
            is_more = local > hit if turn.start == turn.offer else self._is_exact(resume, hit)
            return resume if is_more else None
        if self._side.state.is_waiting(turn_id):
            return None
        way = self._side.state.resume(turn_id, turn.request.num_tokens)
        if isinstance(way, Replay):
            resume = ResumeAt(way.start, way.floor, way.floor)
            return resume if self._is_exact(resume, hit) else None
        return None

    def _is_exact(self, resume: ResumeAt, hit: int) -> bool:
        """Return whether a replay from nothing is right at its end, and begins behind vLLM's hit.
        One from a point is not offered to vLLM: to go on at the point computes no more."""
        return hit < resume.start <= resume.hit - self._replays.lengths.reach
