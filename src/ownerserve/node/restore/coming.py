"""Sessions come to a node from the owner that they leave: their state is brought as a turn's is,
and no turn runs. Pure.

    coming   its state is looked for, read, verified; it lands on the device, and takes room there
             as the session's next turn would
    came     it is the node's: idle from now on, as one whose turn has ended here
"""

from __future__ import annotations

from collections.abc import Collection

from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.node.vocabulary.events import RestoreOutcome, SessionComing, TurnArrived

WITHIN_S = 60.0
"""Nobody waits for what comes in a gap: it may take longer than what a turn waits for."""
ANY_TOKEN = bytes(TOKEN_BYTES)
"""Stands for whatever the next turn adds: a restore leaves at least one token to compute."""
USABLE = frozenset({RestoreOutcome.LOADED, RestoreOutcome.RESIDENT})
"""What a session is taken over with: its state. NOT_WORTH_IT, bringing it would cost more than it
saves, will do where the session can't stay where it is."""


class ComingSessions:
    """`ComingSessions` owns which restores are of sessions that come, by the turn that stands for
    each."""

    def __init__(self) -> None:
        self._under_way: set[TurnId] = set()

    @property
    def turn_ids(self) -> Collection[TurnId]:
        """The turns that stand for what comes now."""
        return tuple(self._under_way)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._under_way

    def begin(self, event: SessionComing) -> TurnArrived:
        """Return the turn that nobody will run, and that the state is brought for."""
        self._under_way.add(event.turn_id)
        return TurnArrived(
            event.turn_id,
            None,
            event.hashed.tokens + ANY_TOKEN,
            lender=event.lender,
            lent_as=event.session_id,
            within_s=WITHIN_S,
        )

    def landed(self, turn_id: TurnId) -> bool:
        """Return whether the turn stands for a session that comes, and end it."""
        if turn_id not in self._under_way:
            return False
        self._under_way.remove(turn_id)
        return True
