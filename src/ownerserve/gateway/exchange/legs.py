"""Legs is what an exchange asks of the gateway for a turn that runs at more than one worker, a call
for each step; what runs at one alone is Turns' (turns.py).

| leg | begins when | ends with |
|---|---|---|
| prefill | its worker is decided apart | ComputedApart, or NotComputedApart: on without it |
| | and speaks our protocol | FirstByte, with what the worker that asked it says of the prompt |
| ahead | so, where both are asked at once | ComputedApart; the answer's begin, whatever fails |
| hedge | nothing came of the first for long | as any dispatch, if it is first; Outrun, LegFailed |
| carry_on | a stream stops in its middle (CarryOn) | as any dispatch |
| move | a turn is stopped amid its answer (MovedOn) | as any dispatch |

A leg that fails fails no turn. `counts` says what became of legs, by (leg, outcome).
"""

from __future__ import annotations

from collections import Counter

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.config import Config, PrefillLegs, StreamUsage
from ownerserve.gateway.exchange.usage import usage_saids
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.turns import LostPrefill, Route, Turns
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.messages import (
    ComputedApart,
    Dispatch,
    Failure,
    Hedge,
    LegFailed,
    Noted,
    Outrun,
)
from ownerserve.router.requests.body import BodyFields, Said

_PREFILL = "prefill"
_AHEAD = "ahead"
COMPUTED = "computed"
_HEDGE = "hedge"
_CARRY_ON = "carry_on"
_MOVE = "move"


class Legs:
    """The legs of one gateway's turns."""

    def __init__(self, turns: Turns, config: Config) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.pauses_s = Histogram()
        """How long clients had nothing of streams that moved."""
        self.longest_pause_s = 0.0
        self.prompt_patience_s = config.first_byte_timeout_s
        """How long a worker that is up may take to compute a prompt."""
        self.hedge_after_s = config.hedge_after_s
        """After so long without an answer a second worker is asked too; None: never."""
        self.carries_on = config.carry_on
        """Whether a stream that stops in its middle is carried on by another worker."""
        self.sends_ahead = config.prefill_legs is PrefillLegs.BOTH
        """Whether who computes a prompt is asked at once with who answers, by whom it is asked
        alone else."""
        self.asks_usage = config.stream_usage is StreamUsage.ASK
        self._turns = turns

    def usage_saids(self, target: bytes, fields: BodyFields) -> tuple[Said, ...]:
        """Return what a body is to say so that its stream ends with its usage; nothing where its
        client asks, or where nobody is to."""
        return usage_saids(target, fields) if self.asks_usage else ()

    def prefilled(self, dispatch: Dispatch) -> None:
        """Note that the prompt is computed apart, as decided."""
        self.counts[_PREFILL, "done"] += 1
        self._turns.state.handle(ComputedApart(dispatch.receipt), self._turns.now())

    def ahead(self, dispatch: Dispatch, outcome: str) -> None:
        """Note what became of the leg that asked for a prompt ahead; its turn goes on."""
        self.counts[_AHEAD, outcome] += 1
        if outcome == COMPUTED:
            self._turns.state.handle(ComputedApart(dispatch.receipt), self._turns.now())

    def answered(self, mode: ExecutionMode | None) -> None:
        """Note what came of a turn whose worker was to ask another to compute its prompt, by its
        own word; one that says nothing is not counted. The state hears it with the first byte."""
        if mode is not None:
            is_apart = mode is ExecutionMode.REMOTE_PREFILL
            self.counts[_PREFILL, "done" if is_apart else "on_the_spot"] += 1

    def not_prefilled(
        self, asked: IdentifiedRequest, dispatch: Dispatch, failure: Failure, *, request_id: bytes
    ) -> Route:
        """Note that the prompt could not be computed apart, and return where the turn goes on."""
        self.counts[_PREFILL, failure.value] += 1
        lost = LostPrefill(dispatch, failure)
        route = self._turns.decide(asked, lost, request_id=request_id)
        assert isinstance(route, Route), "a dispatch that goes on is not refused"
        return route

    def hedge(
        self, asked: IdentifiedRequest, dispatch: Dispatch, *, request_id: bytes
    ) -> Route | Noted:
        """Decide which worker is asked too, while nothing comes of the dispatch; NOTED: there is
        none, or retries are used up."""
        turns, now = self._turns, self._turns.now()
        second = turns.state.handle(Hedge(dispatch.receipt), now)
        if isinstance(second, Noted):
            self.counts[_HEDGE, "nobody"] += 1
            return second
        self.counts[_HEDGE, "sent"] += 1
        turns.observer.decided(request_id, asked, second)
        if turns.access_log is not None:
            session = asked.arrive.session
            turns.access_log.decided(
                request_id,
                second,
                session=session,
                lost=None,
                trace_id=asked.trace_id,
                now_s=now,
            )
        return Route(turns, second, asked.trace)

    def outrun(self, dispatch: Dispatch, outcome: str) -> None:
        """End one of two legs: the other one's answer begins, or the turn ends."""
        self._ended(Outrun(dispatch.receipt), outcome)

    def failed(self, dispatch: Dispatch, failure: Failure, outcome: str) -> None:
        """End one of two legs that failed; the other one goes on."""
        self._turns.observer.pressed("failed", failure.value)
        self._ended(LegFailed(dispatch.receipt, failure), outcome)

    def _ended(self, event: Outrun | LegFailed, outcome: str) -> None:
        turns, now = self._turns, self._turns.now()
        self.counts[_HEDGE, outcome] += 1
        turns.state.handle(event, now)
        if turns.access_log is not None:
            end = "outrun" if isinstance(event, Outrun) else "leg_failed"
            turns.access_log.ended(event.receipt, end, usage=None, now_s=now)

    def carried(self, outcome: str) -> None:
        """Count what became of a stream whose worker was lost."""
        self.counts[_CARRY_ON, outcome] += 1

    def moved(self, outcome: str) -> None:
        """Count what became of a turn that was to move amid its answer."""
        self.counts[_MOVE, outcome] += 1

    def paused(self, pause_s: float) -> None:
        """Count how long a client had nothing of a stream that moved."""
        self.pauses_s.observe(pause_s)
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
