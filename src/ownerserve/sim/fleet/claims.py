"""This module says what a simulated gateway hears of owners and what it asks for, as gateways of
real fleets do.

    a session without a place to go to ── FindSession ──> directory ──> Claimed
    first byte: the answer's line says who owns, under which epoch ───> FirstByte
    AskRelease, by RouterState ── ReleaseSession ──> the owner: lets go, hands over ──> ReleaseEnded

Decides nothing: RouterState hears and asks, the owner refuses while a turn of the session is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.router.messages import AskRelease, Claimed, LetGo, ReleaseEnd, ReleaseEnded
from ownerserve.router.state import RouterState
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.worker.worker import SimWorker


class Claims:
    """The claims are one gateway's. The way to a worker's node is as long as the one to the
    directory."""

    def __init__(
        self,
        heap: Heap,
        router: RouterState,
        ownership: SimOwnership,
        *,
        workers: Sequence[SimWorker],
    ) -> None:
        self._heap = heap
        self._router = router
        self._ownership = ownership
        self._workers = workers

    def is_stranger(self, session: SessionId) -> bool:
        """Return whether the directory may know more of the session than this gateway."""
        known = self._router.sessions.get(session)
        return known is None or known.live_home is None

    def look_up(self, session: SessionId, then: Callable[[float], None], now: float) -> None:
        """Ask the directory who owns the session; `then` is called with the time of its answer."""
        self._ownership.find(session, partial(self._found, then), now)

    def _found(self, then: Callable[[float], None], claimed: Claimed | None, now: float) -> None:
        if claimed is not None:
            self._router.handle(claimed, now)
        then(now)

    def epoch_of(self, session: SessionId) -> Epoch | None:
        """Return the highest epoch that was heard of the session, or None: a turn's line takes it
        down to the worker."""
        known = self._router.sessions.get(session)
        return None if known is None else known.epoch

    def named(self, session: SessionId, unit: RoutingUnit, now: float) -> Claimed | None:
        """Return whom a worker's answer, as it begins, names as the session's owner."""
        return self._ownership.owner_of(session, unit, now)

    def let_go(self, wanted: LetGo, now: float) -> None:
        """Ask the session's former worker to let its cached state go first."""
        self._heap.at(now + self._ownership.delay_s, partial(self._let_go, wanted))

    def _let_go(self, asked: LetGo, now: float) -> None:
        source = self._living(asked.source)
        if source is not None:
            _let_go(source, asked.session)

    def _living(self, unit: RoutingUnit) -> SimWorker | None:
        return next((one for one in self._workers if one.is_up and one.unit == unit), None)

    def ask(self, wanted: AskRelease, now: float) -> None:
        """Ask the owner of a session to hand it over."""
        self._heap.at(now + self._ownership.delay_s, partial(self._release, wanted))

    def _release(self, asked: AskRelease, now: float) -> None:
        """Hear the question at the source, and answer. A worker that is down says nothing."""
        source = self._living(asked.source)
        end = ReleaseEnd.KEPT
        if source is not None and not gauge.has_turn_of(source, asked.session):
            end = self._ownership.release(asked, now)
            if end is ReleaseEnd.RELEASED:
                _let_go(source, asked.session)
        self._router.handle(ReleaseEnded(asked.session, asked.epoch, end), now)


def _let_go(worker: SimWorker, session: SessionId) -> None:
    """Have what the worker has of a session that runs elsewhere go first, as its admission does."""
    known = worker.cache.sessions.get(session)
    if known is not None and not known.running:
        worker.cache.sessions.let_go(session)
