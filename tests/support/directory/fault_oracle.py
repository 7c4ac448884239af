"""An independent eye on the directory's answers: what was granted to whom, and what may be lost."""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.records import (
    PrefixRecord,
    SessionRecord,
    prefix_of,
    session_of,
)
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from tests.support.directory.fault_net import DoubleOwner, Violation


class Oracle:
    """Sees every request, the record before it and the outcome. Knows who physically has what."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._granted: dict[Epoch, tuple[object, RoutingUnit]] = {}
        self._lease_until: dict[RoutingUnit, float] = {}
        self._life: dict[object, int] = {}  # the latest that this memory has registered
        self._ever: dict[object, int] = {}  # the latest that any memory has
        self._known: set[SessionId] = set()  # what this memory has made an owner of
        self.copies: set[tuple[PrefixHash, RoutingUnit]] = set()
        self.lost: set[tuple[PrefixHash, RoutingUnit]] = set()  # by a crash

    def forget(self) -> None:
        """The directory lost its memory: it can't know who was alive before."""
        self._life.clear()
        self._lease_until.clear()
        self._known.clear()

    def is_superseded(self, unit: RoutingUnit) -> bool:
        """A later life of it has registered: it may believe otherwise until the fence stops it."""
        return self._ever.get((unit.worker, unit.dp_rank), 0) > unit.incarnation

    def before(
        self, state: DirectoryState, request: ask.Request
    ) -> PrefixRecord | SessionRecord | None:
        match request:
            case ask.Drop():
                return prefix_of(state.records, request.prefix_hash)
            case ask.Advance():
                return session_of(state.records, request.session_id)
        return None

    def after(
        self,
        request: ask.Request,
        outcome: ask.Outcome,
        now_s: float,
        *,
        record: PrefixRecord | SessionRecord | None,
        is_open: Callable[[], bool],
    ) -> None:
        match request, outcome:
            case (ask.Register() | ask.RenewLease(), ask.Leased()):
                self._alive(request.unit, now_s)
            case (ask.Bind(), ask.Bound()):
                self._once(outcome.epoch, request.session_id, request.unit)
                self._known.add(request.session_id)
            case (ask.Transfer(), ask.Bound()):
                if outcome.epoch not in self._granted:
                    self._lives(request.target, now_s)
                self._once(outcome.epoch, request.session_id, request.target)
                self._known.add(request.session_id)
            case (ask.EndSession(), ask.Ended()):
                self._known.discard(request.session_id)
            case (ask.Publish(), ask.Published()) if outcome.adopted:
                self._adopted(outcome, is_open)
            case (ask.Advance(), ask.Advanced()):
                assert isinstance(record, SessionRecord)
                if request.tokens < record.tokens:
                    raise Violation(f"{request.session_id} went back to {request.tokens} tokens")
            case (ask.Drop(), ask.Dropped()) if isinstance(record, PrefixRecord) and record.refs:
                self._not_last(request, now_s)

    def _once(self, epoch: Epoch, what: object, unit: RoutingUnit) -> None:
        known = self._granted.setdefault(epoch, (what, unit))
        if known != (what, unit):
            raise DoubleOwner(f"{epoch} was issued for {known} and for {(what, unit)}")

    def _alive(self, unit: RoutingUnit, now_s: float) -> None:
        place = (unit.worker, unit.dp_rank)
        if self._life.get(place, 0) > unit.incarnation:
            raise Violation(f"{unit} got a lease after life {self._life[place]} had registered")
        self._life[place] = unit.incarnation
        self._ever[place] = max(self._ever.get(place, 0), unit.incarnation)
        self._lease_until[unit] = now_s + self._lease_s

    def _lives(self, unit: RoutingUnit, now_s: float) -> None:
        """A session is handed to one who is there."""
        is_later = self._life.get((unit.worker, unit.dp_rank), 0) > unit.incarnation
        if is_later or self._lease_until.get(unit, 0.0) <= now_s:
            raise Violation(f"a session was handed to {unit}, which is not there")

    def _adopted(self, outcome: ask.Published, is_open: Callable[[], bool]) -> None:
        """Once new owners are made, a late report makes none: there may have been one since."""
        for session_id in outcome.adopted:
            if session_id not in self._known and is_open():
                raise Violation(f"{session_id} has an owner by a report that came too late")
            self._known.add(session_id)

    def _not_last(self, request: ask.Drop, now_s: float) -> None:
        """Someone else has it, or had it and is not known to be dead."""
        for prefix_hash, unit in self.copies | self.lost:
            known_dead = (
                self._life.get((unit.worker, unit.dp_rank), 0) > unit.incarnation
                or self._lease_until.get(unit, 0.0) <= now_s
            )
            if prefix_hash == request.prefix_hash and unit != request.unit and not known_dead:
                return
        raise Violation(f"the last copy of {request.prefix_hash!r} was let go")
