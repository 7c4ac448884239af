"""Turns of a simulated worker that move amid their answers.

real   `LeavingTurns`, `ComingTurns`, `TurnStates`, the scheduler's stop, release and abort
not    the sampler and the text, of which there is none; a leg's head, which is a call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.transfers.turn_moves import ComingTurns, LeavingTurns, StoppedTurn
from ownerserve.node.transfers.turn_states import TurnStates

if TYPE_CHECKING:
    from tests.support.node.schedules.moving_node import MovingNode

UNCLAIMED_S = 9.0
"""In place of the module's: longer than a worker stands still, and over before all must be."""


class TurnState(msgspec.Struct, frozen=True):
    """What is sent of a turn: its prompt with the answer so far, and how much is to come."""

    tokens: list[int]
    left: int


class GoesOn(msgspec.Struct, frozen=True):
    """A turn as its leg has claimed it."""

    state: TurnState
    source: LenderAddress


class Nothing:
    """It brings nothing before a turn is stopped, as of one that has no name."""

    async def bring(self, session_id: SessionId, source: LenderAddress, peer: object, /) -> None:
        """Nothing comes."""


class MovingTurns:
    """To `LeavingTurns` it is the engine."""

    def __init__(self, node: MovingNode) -> None:
        self._node = node
        self.leaving = LeavingTurns(self, node.between)
        self.states = TurnStates(node.cache, node=node.comings, on_engine=node.between)
        states = self.states if node.world.brings_ahead else Nothing()
        self.coming = ComingTurns(lambda _: None, states)
        self.stopped: set[TurnId] = set()
        """Turns that are held while they are sent."""

    def claim(self, told: str, tokens: int) -> GoesOn | None:
        """The turn whose leg comes; None: no such turn is here."""
        kept = self.coming.claim(told, tokens)
        if kept is None:
            return None
        return GoesOn(msgspec.json.decode(kept.state, type=TurnState), kept.source)

    # -- node.transfers.turn_moves.StoppingEngine ----------------------------------------------

    def stop(self, turn: str) -> StoppedTurn | WorkerRefusal:
        node = self._node
        found = [one for one, turns in node.named_turns() if turns.told == turn]
        if not found:
            return WorkerRefusal.UNKNOWN_TURN
        (turn_id,) = found
        if not node.scheduler.stop(turn_id, node.world.loop.time()):
            return WorkerRefusal.NOT_DECODING
        self.stopped.add(turn_id)
        one = node.turns[turn_id]
        tokens = [*one.prompt.plain(0, one.prompt.count), *one.said]
        state = msgspec.json.encode(TurnState(tokens, one.answer - len(one.said)))
        return StoppedTurn(turn_id, node.told_of(turn_id), state)

    def go_on(self, stopped: StoppedTurn) -> None:
        self.stopped.discard(TurnId(stopped.request_id))
        self._node.scheduler.release(TurnId(stopped.request_id))

    def moved(self, stopped: StoppedTurn) -> None:
        turn_id = TurnId(stopped.request_id)
        self.stopped.discard(turn_id)
        if turn_id in self._node.turns:
            self._node.leaves(turn_id, stopped.tokens)
