"""Idle sessions are asked about as if a turn of them came now: where it would run, and whether it
would be better elsewhere; so are turns that run, and others as if a fork of them came. Nothing is
counted, and nobody bound."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.asking import ask
from ownerserve.router.decision import Decision, Move, Replica, move_of
from ownerserve.router.fleet import Candidates, Fleet
from ownerserve.router.messages import Arm, Arrive
from ownerserve.router.rollout.steering import Steering
from ownerserve.router.sessions import RoutedSession, SessionTable
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Worker


class ForkShape(msgspec.Struct, frozen=True, gc=False):
    """A fork's shape is what it shares with its parent and what it adds, in tokens, and its arm."""

    shared_tokens: int
    new_tokens: int
    arm: Arm


class IdleDecisions:
    """This class decides about what is to move. `deciding`: who decides now, and by
    which numbers."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: SessionTable,
        deciding: Callable[[], tuple[Steering, Settings]],
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._deciding = deciding

    def place(self, name: SessionId, source: Worker, arm: Arm, now: float) -> Worker | None:
        """Return the worker, but `source`, which owns the session, where a turn of it would run
        were it to come now, of those that can take its state over; None: there is none, or it is
        not idle."""
        session = self._sessions.get(name)
        if session is None or session.pending or session.owner is not source:
            return None
        candidates = self._sharing_state(source.profile.spec_digest, arm).without((source,))
        if not candidates:
            return None
        arrive = _arrive(name, session, 1, arm)
        return self._decide(arrive, session, candidates, now).worker

    def place_running(self, arrive: Arrive, source: Worker, now: float) -> Worker | None:
        """Return the worker, but `source`, where a turn that runs there would run were it to come
        now, of those that can take its state over; None: there is none."""
        session = None
        if arrive.session is not None:
            session = self._sessions.get(self._sessions.resolve(arrive.session))
        digest = source.profile.spec_digest
        candidates = self._sharing_state(digest, arrive.arm).without((source,))
        if not candidates:
            return None
        return self._decide(arrive, session, candidates, now).worker

    def move(self, name: SessionId, new_tokens: int, arm: Arm, now: float) -> Move | None:
        """Return the move that the policy would want of the session were a turn to come now that
        adds so many tokens, to a worker that can take its state over; None: there is none, or it is
        not idle."""
        session, (steering, _) = self._sessions.get(name), self._deciding()
        owner = None if session is None else session.live_owner
        if session is None or session.pending or owner is None or not steering.moves(arm):
            return None
        candidates = self._sharing_state(owner.profile.spec_digest, arm)
        if owner not in candidates:
            return None
        arrive = _arrive(name, session, new_tokens, arm)
        move = move_of(self._decide(arrive, session, candidates, now), owner)
        if move is None or PlacementAction.STATE_MIGRATION not in move.target.profile.actions:
            return None
        return move

    def replica(self, parent: SessionId, shape: ForkShape, now: float) -> Replica | None:
        """Return the replica that the policy would want of the session's beginning were such a fork
        of it to come now; None: there is none."""
        session = self._sessions.get(parent)
        prefix = None if session is None else session.prefix or session.stem
        if session is None or prefix is None:
            return None
        candidates = self._sharing_state(prefix.spec_digest, shape.arm)
        if not candidates:
            return None
        fork = RoutedSession(now)
        fork.bytes_per_token, fork.output_tokens = session.bytes_per_token, session.output_tokens
        fork.fork(prefix, shape.shared_tokens)
        try:
            arrive = _arrive(parent, fork, shape.new_tokens, shape.arm)
            wanted = self._decide(arrive, fork, candidates, now).wanted
        finally:
            fork.leave()
        return wanted if isinstance(wanted, Replica) else None

    def _sharing_state(self, digest: str, arm: Arm) -> Candidates:
        """Return the candidates that lend state, and whose state is of that digest."""
        everyone = self._deciding()[0].eligible(self._fleet.candidates(None), arm)
        unfit = [
            one
            for one in everyone.everyone()
            if one.profile.spec_digest != digest or Tier.DEVICE not in one.profile.lends
        ]
        return everyone.without(unfit) if unfit else everyone

    def _decide(
        self, arrive: Arrive, session: RoutedSession | None, candidates: Candidates, now: float
    ) -> Decision:
        steering, settings = self._deciding()
        request = ask(arrive, session, candidates, limits=settings, now_s=now)
        return steering.decide(request, candidates, arrive.arm)


def _arrive(name: SessionId, session: RoutedSession, new_tokens: int, arm: Arm) -> Arrive:
    """Return a turn that adds so many tokens to what is known of the session."""
    prompt_bytes = int((session.known_tokens + new_tokens) * session.bytes_per_token)
    return Arrive(name, prompt_bytes, arm=arm)
