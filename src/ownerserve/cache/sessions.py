"""The session table. Metadata only: owns versions, soft references and their TTL, no slot.

A soft reference orders eviction and nothing else; what a session may re-use is what the tree has
(invariant 6). Every method that changes a frontier does so by `tree.lift` and `tree.anchor`.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import SessionStatus
from ownerserve.cache.policies.base import Policy
from ownerserve.cache.tree import paths
from ownerserve.cache.tree.node import ResumeDepth, Session
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId

FORGET_CHECK_S = 600.0
"""How long a session of which nothing is resident is remembered, unless its reference lasts longer:
one that comes back is told from a new one."""


MORE_EXPECTED = 1
"""A turn that is here counts as two sessions that may come: what it goes on from goes after the
state of any idle one."""


class Sessions:
    """Sessions by id, and in a heap when to look at each next."""

    def __init__(self, tree: PrefixTree, layout: Layout, *, policy: Policy) -> None:
        self._tree = tree
        self._pins_idle = policy.pins_idle_sessions
        self._layout = layout
        self._by_id: dict[SessionId, Session] = {}
        self.expected: dict[TurnId, Session] = {}
        """Soft references of turns that are here and have not begun; see `expect`."""
        self._checks: list[tuple[float, int, Session]] = []
        self._generations = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: SessionId) -> Session | None:
        """The record, if the session is known."""
        return self._by_id.get(session_id)

    def open(self, session_id: SessionId, now: float) -> Session:
        """The record, made when missing. A released id that comes back is a new generation, so
        that a turn of its former life can't move it."""
        session = self._by_id.get(session_id)
        if session is None:
            self._generations += 1
            session = Session(session_id=session_id, generation=self._generations)
            self._by_id[session_id] = session
            self._look_again(session, now + FORGET_CHECK_S)
        return session

    def _look_again(self, session: Session, at_s: float) -> None:
        """One entry a session: one that waits already under an earlier instant is put back when
        that comes, so a turn pushes none."""
        session.next_check_s = at_s
        if not 0.0 <= session.queued_s <= at_s:
            session.queued_s = at_s
            heappush(self._checks, (at_s, session.generation, session))

    def is_current(self, session: Session) -> bool:
        """False for a record that was released while a turn still held it."""
        return self._by_id.get(session.session_id) is session

    def move(self, session: Session, stop: ResumeDepth | None, *, ttl_s: float, now: float) -> None:
        """The frontier goes to `stop` with a fresh soft reference until now + ttl_s; None: the
        turn sealed no block, there is nothing to stand at."""
        before = self._tree.lift(session)
        session.last_s = now
        session.expires_s = now + ttl_s
        session.is_referenced = ttl_s > 0
        self._look_again(session, session.expires_s)
        if stop is None:
            session.row = None
        else:
            if before is not None and before.uses >= stop.uses:
                stop.uses = before.uses + 1
            self._tree.anchor(session, stop)
        if before is not None:
            self._tree.prune(before)  # only now: it may be the same one
        if self._pins_idle and stop is not None:
            self._pin(session, stop)

    def _pin(self, session: Session, stop: ResumeDepth) -> None:
        former, session.pin = session.pin, self._tree.lock(stop.node, stop.depth)
        if former is not None:
            self._tree.unlock(former)

    def expire(self, now: float) -> None:
        """Drop the soft references that are due; forget sessions of which nothing is left."""
        checks, left = self._checks, self._tree.left
        if left:
            for session in left:
                if session.queued_s < 0.0:
                    self._look_again(session, now + FORGET_CHECK_S)
            left.clear()
        while checks and checks[0][0] <= now:
            due, _, session = heappop(checks)
            if due != session.queued_s or not self.is_current(session):
                continue
            session.queued_s = -1.0
            if due < session.next_check_s:
                self._look_again(session, session.next_check_s)
                continue
            self._dereference(session)
            if session.stop is not None:
                continue  # the tree says when nothing of it is left
            if session.running:
                self._look_again(session, now + FORGET_CHECK_S)
            else:
                del self._by_id[session.session_id]

    def next_due(self) -> float | None:
        """When `expire` has something to look at."""
        return self._checks[0][0] if self._checks else None

    def _dereference(self, session: Session) -> None:
        if session.is_referenced and session.stop is not None:
            session.stop.refs -= 1
            self._tree.cool(session.stop)
        session.is_referenced = False

    def release(self, session_id: SessionId) -> None:
        """Forget the session. Frees nothing: its blocks are ordinary ones from now on.

        Raises InvalidInput when the id is unknown.
        """
        session = self._by_id.pop(session_id, None)
        if session is None:
            raise InvalidInput("session_id", f"{session_id!r} is unknown", "list the sessions")
        stop = self._tree.lift(session)
        if stop is not None:
            self._tree.prune(stop)
        session.row = None
        session.is_referenced = False
        if session.pin is not None:
            self._tree.unlock(session.pin)
            session.pin = None

    def expect(self, turn_id: TurnId, stop: ResumeDepth, now: float) -> None:
        """A turn that goes on from `stop` is here and can't begin yet: a soft reference of its own,
        in place of its former one, until `met`."""
        waiting = self.expected.get(turn_id)
        before = None if waiting is None else self._lift_expected(waiting)
        self._generations += 1
        waiting = Session(
            session_id=SessionId(f"turn {turn_id}"),
            generation=self._generations,
            sealed=stop.depth,
            is_referenced=True,
        )
        self.expected[turn_id] = waiting
        self._tree.anchor(waiting, stop)
        stop.refs += MORE_EXPECTED
        stop.last_s = max(stop.last_s, now)
        if before is not None:
            self._tree.prune(before)  # only now: it may be the same one

    def met(self, turn_id: TurnId) -> None:
        """The turn has ended or is gone; one that nobody expected is no error."""
        waiting = self.expected.pop(turn_id, None)
        stop = None if waiting is None else self._lift_expected(waiting)
        if stop is not None:
            self._tree.prune(stop)

    def _lift_expected(self, waiting: Session) -> ResumeDepth | None:
        stop = self._tree.lift(waiting)
        if stop is not None:
            stop.refs -= MORE_EXPECTED
        return stop

    def all(self) -> list[Session]:
        """Every record, oldest generation first."""
        return list(self._by_id.values())

    def status(self, session_id: SessionId) -> SessionStatus | None:
        """What the tree holds for a session now; None when the id is unknown."""
        session = self._by_id.get(session_id)
        return self._status(session) if session is not None else None

    def list(self) -> tuple[SessionStatus, ...]:
        """All sessions, as `status` gives them."""
        return tuple(self._status(session) for session in self._by_id.values())

    def _status(self, session: Session) -> SessionStatus:
        layout, node = self._layout, session.node
        resident: dict[str, int] = {}
        points = dict.fromkeys(layout.point_names, 0)
        restorable = 0 if layout.point_names else session.depth
        for stop in paths.stops_above(node, session.depth) if node is not None else ():
            for name, slot in zip(layout.point_names, stop.slots or (), strict=False):
                points[name] += slot >= 0
            if stop.is_complete:
                restorable = max(restorable, stop.depth)
        for component in layout.components:
            slots = points.get(component.name, session.depth)
            resident[component.name] = slots * component.slot_bytes
        return SessionStatus(
            session_id=session.session_id,
            version=session.version,
            tokens=session.tokens,
            resident_tokens=session.depth * layout.block_tokens,
            restorable_tokens=restorable * layout.block_tokens,
            resident_bytes=resident,
            running_turns=session.running,
            last_s=session.last_s,
            expires_s=session.expires_s,
        )
