"""The ports are all that an exchange asks of the gateway, a call for each step of a turn."""

from __future__ import annotations

from typing import Protocol

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.entry.comments import WaitComments
from ownerserve.gateway.http.client import HttpRequest
from ownerserve.gateway.http.heads import RequestHead, ResponseHead
from ownerserve.gateway.refusals import Refusals
from ownerserve.gateway.stamps import TurnRefused
from ownerserve.gateway.turns import (
    Arrived,
    BegunAnswer,
    EndedLeg,
    NotLetIn,
    Route,
)
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.entry.queue import Entrant, HeldTurn
from ownerserve.router.messages import Aborted, Broken, Dispatch, Failure, Noted, Refuse
from ownerserve.router.requests.body import BodyFields, Said
from ownerserve.router.sessions import RoutedSession


class TurnPort(Protocol):
    """A turn port is all that an exchange asks of the gateway, a call for each step of a turn
    (turns.Turns)."""

    refusals: Refusals
    comments: WaitComments

    def read(self, request: HttpRequest) -> Arrived:
        """Read who asks, and for what. Raises Rejected, or Elsewhere."""
        ...

    def enter(
        self, asked: IdentifiedRequest, head: RequestHead, entrant: Entrant, *, came_s: float
    ) -> HeldTurn | None:
        """Let the turn, which came at `came_s`, in or turn it away at once, and return None; or
        hold it in the queue. Raises Rejected."""
        ...

    def decide(
        self,
        asked: IdentifiedRequest,
        lost: EndedLeg | None = None,
        *,
        request_id: bytes,
    ) -> Route | Refuse:
        """Decide where the turn runs, for the first time or after a dispatch that was lost."""
        ...

    def patience_s(self, asked: IdentifiedRequest) -> float:
        """Return how long a worker that is up may send nothing of the answer, in seconds."""
        ...

    def began(
        self, dispatch: Dispatch, head: ResponseHead, *, started_s: float
    ) -> BegunAnswer | TurnRefused:
        """Take in an answer's head: return the worker's word on it, or its no to the turn."""
        ...

    def receipt(self, asked: IdentifiedRequest, dispatch: Dispatch, head: ResponseHead) -> bytes:
        """Return the header lines that tell the client of the decision."""
        ...

    def finished(
        self,
        asked: IdentifiedRequest,
        dispatch: Dispatch,
        begun: BegunAnswer,
        tail: bytes,
        *,
        alias: SessionId | None,
        started_s: float,
    ) -> None:
        """Close the books of a turn whose answer is whole; `tail` are its last bytes."""
        ...

    def session_of(self, dispatch: Dispatch) -> RoutedSession | None:
        """Return the turn's session, as the router knows it now."""
        ...

    def ended(
        self, asked: IdentifiedRequest, event: NotLetIn | Aborted | Broken | None = None
    ) -> None:
        """End a turn without a whole answer."""
        ...


class LegPort(Protocol):
    """A leg port is what an exchange asks for a turn that runs at more than one worker
    (legs.Legs)."""

    prompt_patience_s: float
    hedge_after_s: float | None
    carries_on: bool
    sends_ahead: bool

    def usage_saids(self, target: bytes, fields: BodyFields) -> tuple[Said, ...]:
        """Return what a body is to say so that its stream ends with its usage."""
        ...

    def prefilled(self, dispatch: Dispatch) -> None:
        """Note that the prompt is computed apart, as decided."""
        ...

    def ahead(self, dispatch: Dispatch, outcome: str) -> None:
        """Note what became of the leg that asked for a prompt ahead."""
        ...

    def answered(self, mode: ExecutionMode | None) -> None:
        """Note what came of a turn whose worker was to ask another to compute its prompt."""
        ...

    def not_prefilled(
        self, asked: IdentifiedRequest, dispatch: Dispatch, failure: Failure, *, request_id: bytes
    ) -> Route:
        """Note that the prompt could not be computed apart, and return where the turn goes on."""
        ...

    def hedge(
        self, asked: IdentifiedRequest, dispatch: Dispatch, *, request_id: bytes
    ) -> Route | Noted:
        """Decide which worker is asked too, while nothing comes of the dispatch; NOTED: none."""
        ...

    def outrun(self, dispatch: Dispatch, outcome: str) -> None:
        """End one of two legs: the other one's answer begins, or the turn ends."""
        ...

    def failed(self, dispatch: Dispatch, failure: Failure, outcome: str) -> None:
        """End one of two legs that failed; the other one goes on."""
        ...

    def carried(self, outcome: str) -> None:
        """Count what became of a stream whose worker was lost."""
        ...

    def moved(self, outcome: str) -> None:
        """Count what became of a turn that was to move amid its answer."""
        ...

    def paused(self, pause_s: float) -> None:
        """Count how long a client had nothing of a stream that moved."""
        ...
