"""What a simulated gateway hears of owners, and what it asks for: as gateways of real fleets do.

    a session without a place to go to ── FindSession ──> directory ──> Claimed
    first byte: the answer's line says its owner's epoch ─────────────> Claimed
    done at T while S owns the session ── ReleaseSession ──> S: lets go, hands over to T

Owns who was last said to own each session. Decides nothing: RouterState hears what is claimed, S
refuses while a turn of the session runs there or its epoch is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.messages import Claimed
from ownerserve.router.state import RouterState
from ownerserve.sim.heap import Heap
from ownerserve.sim.ownership import Ownership
from ownerserve.sim.worker import Worker


class Claims:
    """One gateway's. To a worker's node is as far as from there to the directory."""

    def __init__(
        self,
        heap: Heap,
        router: RouterState,
        ownership: Ownership,
        *,
        workers: Sequence[Worker],
    ) -> None:
        self._heap = heap
        self._router = router
        self._ownership = ownership
        self._workers = workers
        self._said: dict[SessionId, Claimed] = {}

    def is_stranger(self, session: SessionId) -> bool:
        """Whether the directory may know more of it than this gateway."""
        known = self._router.sessions.get(session)
        return known is None or known.live_home is None

    def look_up(self, session: SessionId, then: Callable[[float], None], now: float) -> None:
        """Ask who owns it, `then` go on."""
        self._ownership.find(session, partial(self._found, then), now)

    def _found(self, then: Callable[[float], None], claimed: Claimed | None, now: float) -> None:
        if claimed is not None:
            self._hear(claimed, now)
        then(now)

    def began(self, session: SessionId, unit: RoutingUnit, now: float) -> None:
        """A worker's answer begins."""
        grant = self._ownership.standing(session, unit, now)
        if grant is not None:
            self._hear(Claimed(session, unit, grant.epoch), now)

    def _hear(self, claimed: Claimed, now: float) -> None:
        self._said[claimed.session] = claimed
        self._router.handle(claimed, now)

    def done(self, session: SessionId, unit: RoutingUnit, now: float) -> RoutingUnit | None:
        """The answer is complete: another who owns the session is asked to let it go."""
        claimed = self._said.get(session)
        if claimed is None or claimed.unit == unit:
            return None
        self._heap.at(now + self._ownership.delay_s, partial(self._release, claimed, unit))
        return claimed.unit

    def ended(self, session: SessionId) -> None:
        """No later turn of it will come."""
        self._said.pop(session, None)

    def _release(self, claimed: Claimed, target: RoutingUnit, now: float) -> None:
        """At the source, if it is up in the life that was said to own it."""
        session = claimed.session
        living = (worker for worker in self._workers if worker.is_up)
        source = next((worker for worker in living if worker.unit == claimed.unit), None)
        held = None if source is None else source.cache.sessions.get(session)
        if held is not None and held.running:
            return  # it says so; the next turn elsewhere asks again
        if self._said.get(session) is claimed:
            del self._said[session]
        if source is not None and self._ownership.hand_over(claimed, target, now) and held:
            source.cache.sessions.release(session)  # ordinary cached state from now on
