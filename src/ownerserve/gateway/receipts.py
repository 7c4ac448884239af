"""What a client is told of a decision, and a worker of its turn: header lines. Pure."""

from __future__ import annotations

from ownerserve.gateway.asking import Asked
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.wire import turn_line
from ownerserve.kv.wire.turn_line import NOTHING, TurnLine
from ownerserve.router.decision import Option, Reason, TurnClass
from ownerserve.router.messages import Dispatch
from ownerserve.router.sessions import Session

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


def turn_line_of(dispatch: Dispatch, asked: Asked, session: Session | None) -> TurnLine:
    """The line that says whose turn this is and for which worker: another life of the worker
    refuses it (seed 003, v2). `session`: what is known of it, who owned it at which version."""
    return TurnLine(
        name=dispatch.session,
        parent=asked.named_parent or asked.arrive.parent,
        group=None if dispatch.session is None else asked.group,
        final=asked.identity.final,
        epoch=None if session is None else session.epoch,
        version=None if session is None or session.grant is None else session.grant.version,
        target=dispatch.decision.worker.unit,
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


def _priced(option: Option) -> str:
    return f"{option.action.value}@{option.worker.id}={option.total_ms:.1f}"
