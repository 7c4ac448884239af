"""An attempt is one dispatch of an exchange's request, whose receipt is not given back: where it
goes, and in which manner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.turns import Route
from ownerserve.gateway.workers.rpc import HeldPlace, Manner, is_turn
from ownerserve.kv.errors import InvariantViolated
from ownerserve.router.messages import Aborted, Dispatch
from ownerserve.router.requests.body import Said

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange


class Attempt(msgspec.Struct, frozen=True, eq=False):
    """An attempt is one dispatch of an exchange's request, whose receipt is not given back."""

    exchange: Exchange
    asked: IdentifiedRequest
    route: Route
    manner: Manner
    saids: tuple[Said, ...] = ()
    """What the body says besides, to this attempt's worker alone."""

    @property
    def dispatch(self) -> Dispatch:
        """Return what was decided."""
        return self.route.dispatch

    @property
    def asks(self) -> bool:
        """Whether the worker's admission can be asked of this, and is by us."""
        return (
            self.manner is Manner.ASKING
            and self.route.can_ask
            and is_turn(self.exchange.request.head)
        )

    @property
    def is_judged(self) -> bool:
        """Whether the worker's admission has a word in this, also as it arrives."""
        return self.asks and self.route.gives_places

    def without_body(self) -> Attempt:
        """Return the attempt as it goes on once its body is let go."""
        known = self.exchange.turns.session_of(self.dispatch)
        return structs.replace(self, asked=self.asked.without_body(known.turns if known else 0))

    def kept(self) -> Attempt:
        """Return the attempt as it goes on once its worker has said that it had the session's
        state: what the prompt shares with it is free, also where nothing more is told."""
        return structs.replace(self, asked=structs.replace(self.asked, untold_tokens=0))

    def abort(self) -> None:
        """Give the receipt back, as the client hung up."""
        self.exchange.turns.ended(self.asked, Aborted(self.dispatch.receipt))

    def close_books(self) -> None:
        """Give back what a fault, wherever it came, may have left: the receipt, and the turn's part
        in its session."""
        try:
            self.abort()
        except InvariantViolated:  # the receipt was given back before the fault
            self.exchange.turns.ended(self.asked)


def give_back(place: HeldPlace | None) -> None:
    """Give the place back that was held for a turn which won't take it; None is no place."""
    if place is not None:
        place.give_back()
