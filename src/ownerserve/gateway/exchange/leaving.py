"""A turn leaves its worker amid its answer, and goes on at another one: its client has one answer.

    Streaming, CarriedStream ── leave ──> LeavingStream ── ": moved N", end ──> Deciding ─ MovedOn
    AwaitingHead, of an answer that is not streamed ───── refused as moved ──>     │
                                                                                   v
    CarriedStream <── the target's events, behind those of the first <── AwaitingHead <── Connecting

The first worker ends its leg, of its own accord, once the other has what it needs; it says with how
many tokens of the answer, and the leg at the target names them. So nothing is compared, and nothing
comes twice. The leg has no body: what was asked went from worker to worker. A leg that ends in any
other way is not sent on: it breaks, or is whole, as any.

A stream is taken event by event from when its turn is asked to leave, so that the word at its end
does not reach its client, and it can go on behind that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.awaiting import AwaitingHead
from ownerserve.gateway.exchange.carrying import (
    CarriedStream,
    FirstOfStream,
    PartSaid,
    is_chat,
    last_words,
)
from ownerserve.gateway.exchange.relaying import Streaming
from ownerserve.gateway.exchange.told import Told
from ownerserve.gateway.http.events import chunk, comment
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import Rejected, cut_short
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.turns import BegunAnswer, SentOn
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import read_moved_comment
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Dispatch, Failure
from ownerserve.router.worker import Worker

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange

NO_BODY: Sequence[bytes | memoryview] = ()


class LeavingTurn:
    """A leaving turn is one that is asked to go on at `target`."""

    __slots__ = ("spoke_at_s", "target", "tokens")

    def __init__(self, target: RoutingUnit) -> None:
        self.target = target
        self.tokens = 0
        """How many tokens of the answer its client has, by its first worker's last word."""
        self.spoke_at_s = asyncio.get_running_loop().time()
        """When its client got something last."""

    def went_to(self, dispatch: Dispatch) -> bool:
        """Return whether the dispatch is the leg at the target."""
        decision = dispatch.decision  # also where it is another connection's
        return decision.reason is DispatchReason.MOVED and decision.worker.unit == self.target

    def sent_on(self, exchange: Exchange, attempt: Attempt) -> SentOn:
        """Count that the turn goes on, and return how its leg has ended."""
        exchange.legs.moved("begun")
        return SentOn(attempt.dispatch, self.target)


def leaving_from(exchange: Exchange, worker: Worker) -> Attempt | None:
    """Return the attempt of a turn that could leave the worker now; None: it does not run there,
    has another leg, or nothing is written of its answer."""
    phase = exchange.phase
    if not isinstance(phase, Streaming | CarriedStream | AwaitingHead):
        return None
    attempt, head = phase.attempt, exchange.request.head
    if attempt.dispatch.decision.worker is not worker or not is_chat(head):
        return None
    if isinstance(phase, AwaitingHead) and attempt.asked.fields.raw("stream") == b"true":
        return None
    return attempt


def leave(exchange: Exchange, target: RoutingUnit) -> LeavingTurn | None:
    """Have the exchange follow its turn to the target, once that is asked to go on there; None: it
    can't, as its client has a part of a line."""
    leaving = LeavingTurn(target)
    phase = exchange.phase
    if isinstance(phase, Streaming | CarriedStream):
        stream = _leaving_stream(phase, leaving)
        if stream is None:
            return None
        exchange.phase = stream
        stream.upstream.hand_to(stream)
    exchange.leaving = leaving
    return leaving


def _leaving_stream(phase: Streaming | CarriedStream, leaving: LeavingTurn) -> LeavingStream | None:
    told, pending = Told(), b""
    if isinstance(phase, Streaming):
        unsaid = phase.left_off()
        if unsaid is None:
            return None
        told.can_be_continued = False  # nobody knows what the client was told before
        pending = unsaid
    else:
        left = phase.left_off()
        if left is None:
            return None
        told, pending = left
    return LeavingStream(phase, FirstOfStream(told), leaving=leaving, pending=pending)


class LeavingStream(CarriedStream):
    """In this phase events go to the client as they come; where its worker says that they go on
    elsewhere, they are asked for there."""

    __slots__ = ("_has_moved", "_leaving")

    def __init__(
        self,
        before: Streaming | CarriedStream,
        leg: FirstOfStream,
        *,
        leaving: LeavingTurn,
        pending: bytes,
    ) -> None:
        super().__init__(before.attempt, before.upstream, before.begun, leg)
        self._pending = pending
        self._leaving = leaving
        self._has_moved = False

    def taken(self, event: bytes) -> bytes:
        """Return what the client gets for an event: not the word that the turn has moved."""
        said = event.lstrip(b"\r\n")  # of an event before, whose end came late
        tokens = read_moved_comment(said)
        if tokens is None:
            self._leaving.spoke_at_s = asyncio.get_running_loop().time()
            return super().taken(event)
        self._leaving.tokens, self._has_moved = tokens, True
        return event[: len(event) - len(said)]

    def answer_end(self, tail: bytes) -> None:
        """Go on at the target, where the turn has moved there; else close the books of an answer
        that is whole."""
        exchange = self.attempt.exchange
        if not self._has_moved:
            exchange.leaving = None
            super().answer_end(tail)
            return
        exchange.begun = PartMoved(self._leg.told, self.begun, self._leaving)
        exchange.carry_on(self.attempt, self._leaving.sent_on(exchange, self.attempt))

    def answer_broken(self, failure: Failure) -> None:
        """Have another worker carry on, where that can be, as the stream stops in its middle: its
        worker is lost, whatever was sent before."""
        exchange = self.attempt.exchange
        exchange.leaving = None
        exchange.legs.moved("source_lost")
        super().answer_broken(failure)


class PartMoved(PartSaid):
    """The client has a part of a stream, of which another worker has the rest."""

    __slots__ = ("_leaving",)

    def __init__(self, told: Told, begun: BegunAnswer, leaving: LeavingTurn) -> None:
        super().__init__(told, cut_short(Failure.CLOSED), begun)
        self._leaving = leaving

    @property
    def can_be_told_anew(self) -> bool:
        """Whether a worker that begins the answer anew may be asked for the rest: where that is
        known to be the same."""
        return self.told.can_be_continued

    def reject(self, exchange: Exchange, told: Rejected) -> None:
        """Tell the client that its stream stops, as its turn is lost where it went."""
        exchange.legs.moved("lost")
        exchange.client.answer_cut_off(last_words(exchange, cut_short(Failure.CLOSED)))

    def begin(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        came: BegunAnswer,
        *,
        head: ResponseHead,
        first: bytes,
    ) -> BodySink:
        """Have the events of the worker that goes on follow those that the client has."""
        exchange, leaving = attempt.exchange, self._leaving
        if not (leaving.went_to(attempt.dispatch) and head.has_events and head.chunked):
            exchange.legs.moved("lost")
            return super().begin(attempt, upstream, came, head=head, first=first)
        begun = structs.replace(came, first_byte_s=self.begun.first_byte_s)
        stream = CarriedStream(attempt, upstream, begun, FirstOfStream(self.told))
        exchange.phase, exchange.leaving = stream, None
        exchange.legs.moved("joined")
        exchange.legs.paused(asyncio.get_running_loop().time() - leaving.spoke_at_s)
        receipt = exchange.turns.receipt(attempt.asked, attempt.dispatch, head).decode("latin-1")
        said = comment(receipt) if receipt else b""
        exchange.client.write(said if exchange.request.head.version == b"1.0" else chunk(said))
        stream.answer_bytes(first)
        if exchange.phase is stream and not exchange.client.takes_more:
            stream.pause()
        return stream
