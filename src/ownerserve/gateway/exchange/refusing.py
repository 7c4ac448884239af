"""An exchange is refused before anything of its turn is decided: what the operator is told of that
(refusals.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.http.replies import RefusedRequest, Rejected
from ownerserve.gateway.turns import NotLetIn

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange


def refuse_unread(exchange: Exchange, rejected: Rejected) -> None:
    """Tell the client and the operator no: the request is no turn, over a limit, or a fault ended
    it."""
    exchange.turns.refusals.unread(_refused(exchange), rejected)
    exchange.client.answer_rejected(rejected, exchange.request_id)


def turn_away(exchange: Exchange, asked: IdentifiedRequest, rejected: Rejected) -> None:
    """End a turn that is not let in, and tell the operator; its client is still to be told."""
    exchange.turns.refusals.turned_away(asked, _refused(exchange), rejected)
    exchange.turns.ended(asked, NotLetIn())


def _refused(exchange: Exchange) -> RefusedRequest:
    head, address = exchange.request.head, exchange.client.address
    return RefusedRequest(
        exchange.request_id, head.method, head.target, head.special, address, head.caller.tenant
    )
