"""The phases in which a turn is at a worker and nothing of its answer goes to the client: its head
is awaited, or a refusal is read to its end."""

from __future__ import annotations

from http import HTTPStatus

from msgspec import structs

from ownerserve.gateway.exchange.attempt import Attempt, give_back
from ownerserve.gateway.exchange.phases import Sent
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.stamps import TurnRefused
from ownerserve.gateway.workers.rpc import HeldPlace
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.router.messages import Failure


class AwaitingHead(Sent):
    """In this phase the turn is sent and nothing of an answer has come (upstream.HeadSink)."""

    __slots__ = ("__weakref__", "place")

    def __init__(
        self, attempt: Attempt, place: HeldPlace | None, upstream: UpstreamConnection
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.place = place

    def hang_up(self) -> None:
        """Hang up on the worker and give the place back."""
        self.upstream.abort()
        give_back(self.place)

    def answer_begin(self, head: ResponseHead, first: bytes) -> BodySink:
        """Take in the answer's head: the answer begins, or goes on; a refusal is read to its
        end."""
        attempt = self.attempt
        exchange = attempt.exchange
        if head.status >= HTTPStatus.BAD_REQUEST:  # it may be so before the place was looked at
            give_back(self.place)
            if exchange.phase.goes_on_without(attempt, Failure.REFUSED):
                self.upstream.abort()
                return Discarding(attempt, self.upstream, WorkerRefusal.OTHER)
        exchange.phase.begins(attempt)
        exchange.ahead.end()
        came = exchange.turns.began(attempt.dispatch, head, started_s=exchange.started_s)
        if isinstance(came, TurnRefused):
            longest_s = max(came.retry_after_s, exchange.refused.retry_after_s)
            exchange.refused = structs.replace(came, retry_after_s=longest_s)
            exchange.phase = ending = Discarding(attempt, self.upstream, came.why)
            return ending
        attempt.route.answered(head.status)
        if attempt.route.prefiller is not None:
            exchange.legs.answered(came.stamp.mode)
        return exchange.begun.begin(attempt, self.upstream, came, head=head, first=first)

    def answer_failed(self, failure: Failure) -> None:
        """Give the place back; decide again, as nothing of an answer came, unless the turn has
        another leg."""
        give_back(self.place)
        self.attempt.exchange.decide_again(self.attempt, failure)


class Discarding(Sent):
    """In this phase the worker's admission has said no: its answer is read to its end and not
    passed on.

    Nothing is wrong with the worker, and another one may say yes.
    """

    __slots__ = ("refusal",)

    def __init__(
        self, attempt: Attempt, upstream: UpstreamConnection, refusal: WorkerRefusal
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.refusal = refusal

    def answer_bytes(self, data: bytes) -> None:
        """Drop the refusal's text, which is nobody's."""

    def answer_end(self, tail: bytes) -> None:
        """Decide again, as the refusal is whole: its connection may carry the next turn."""
        self.attempt.exchange.decide_again(self.attempt, self.refusal)

    def answer_broken(self, failure: Failure) -> None:
        """Decide again: a refusal that stops in its middle is one all the same."""
        self.attempt.exchange.decide_again(self.attempt, self.refusal)
