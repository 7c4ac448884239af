"""What a client is told of a decision, and a worker of its turn: header lines. Pure."""

from __future__ import annotations

from ownerserve.kv.messages import PlacementAction, RoutingUnit
from ownerserve.kv.wire import turn_line
from ownerserve.kv.wire.turn_line import NOTHING, TurnLine
from ownerserve.router.decision import Option
from ownerserve.router.gateway.asking import Asked
from ownerserve.router.messages import Dispatch, Reason
from ownerserve.router.turns import TurnClass
from ownerserve.router.worker import Worker

PRICED_MAX = 4
"""Alternatives in the header; the admin port has all of them, with their terms."""

_LINE, _ENGINE_LINE = turn_line.HEADER.encode(), turn_line.ENGINE_HEADER.encode()
_REASON = {reason: b"x-ownerserve-reason: %b\r\n" % reason.value.encode() for reason in Reason}
_ACTION = {
    action: b"x-ownerserve-action: %b\r\n" % action.value.encode() for action in PlacementAction
}
_TURN = {turn: b"x-ownerserve-turn: %b\r\n" % turn.value.encode() for turn in TurnClass}


def receipt_lines(dispatch: Dispatch) -> bytes:
    """Where the turn ran, why, by which action, how much was expected to be cached, and what else
    was priced: ACTION@WORKER=MS, cheapest first."""
    decision = dispatch.decision
    lines = b"x-ownerserve-worker: %b\r\n%b%b%bx-ownerserve-expected-cached-tokens: %d\r\n" % (
        dispatch.worker.encode(),
        _REASON[dispatch.reason],
        _ACTION[decision.action],
        _TURN[dispatch.turn],
        decision.cached_tokens,
    )
    if decision.alternatives:
        priced = ", ".join(map(_priced, decision.alternatives[:PRICED_MAX]))
        lines += b"x-ownerserve-priced: %b\r\n" % priced.encode()
    return lines


def turn_line_of(dispatch: Dispatch, asked: Asked) -> TurnLine:
    """The line that says whose turn this is and for which worker: another life of the worker
    refuses it (seed 003, v2)."""
    return TurnLine(
        name=dispatch.session,
        parent=asked.named_parent or asked.arrive.parent,
        final=asked.identity.final,
        target=unit_of(dispatch.decision.worker),
    )


def order_lines(line: TurnLine) -> bytes:
    """The worker's orders for the turn. The name is also the engine's session id, in place of the
    client's."""
    if line == NOTHING:
        return b""
    lines = b"%b: %b\r\n" % (_LINE, turn_line.encode(line))
    if line.name is not None:
        lines += b"%b: %b\r\n" % (_ENGINE_LINE, turn_line.session_id_of(line).encode())
    return lines


def unit_of(worker: Worker) -> RoutingUnit | None:
    """The worker in its present life; None where workers do not tell their lives apart."""
    if worker.incarnation is None:
        return None
    return RoutingUnit(worker.id, worker.dp_rank, worker.incarnation)


def _priced(option: Option) -> str:
    return f"{option.action.value}@{option.worker.id}={option.total_ms:.1f}"
