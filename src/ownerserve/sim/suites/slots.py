"""This module has baselines that the seeds replace: a session's state is one slot, and goes as one.

Owns three parts (sim.build.BaselineParts) that no policy of production has: the worker of seed 001
that frees a whole session at once, and the transfers and the router of seed 003. They use
production's cache; what they do with it is what those seeds tell of SGLang's sessions. Never used
by a fleet that is not called a baseline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.policies.session_reference import SessionReference
from ownerserve.cache.sessions import SessionView
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.state import NodeState
from ownerserve.node.vocabulary.events import Event, TurnArrived, TurnEnded, TurnGone
from ownerserve.router.decision import (
    Decision,
    DispatchReason,
    RoutingRequest,
    run_at,
    split_over,
    start_at,
)
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.apart import NEEDS, prefillers
from ownerserve.router.worker import Worker
from ownerserve.sim.engine.sequence import SimSequence
from ownerserve.sim.storage.nodeport import At, SimNode, Started, ToCheckpoint
from ownerserve.sim.storage.store import SimStore
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Ways
from ownerserve.sim.transfer.network import PeerNetwork
from ownerserve.sim.transfer.outcomes import Then, TransferResult
from ownerserve.sim.transfer.transfers import Transfers
from ownerserve.sim.worker.worker import SimWorker

ANSWER_BLOCKS = 8
"""Kept free for each turn's answer."""

# -- seed 001: the worker ----------------------------------------------------------------------


class SlotOrder(SessionReference):
    """In this eviction order an idle session keeps its lock, as in pinned-slot; once released it
    goes first."""

    name: ClassVar[str] = "session-slot"
    pins_idle_sessions: ClassVar[bool] = True


class SlotNode(SimNode):
    """This node makes room by releasing idle sessions whole, the least recent first.

    So does seed 001 §1.1's `release_session`. Without that a pool full of idle slots refuses every
    turn.
    """

    def __init__(
        self,
        state: NodeState,
        store: SimStore,
        pcie: Ways,
        *,
        at: At,
        started: Started,
        checkpoint: ToCheckpoint | None = None,
    ) -> None:
        super().__init__(state, store, pcie, at=at, started=started, checkpoint=checkpoint)
        self._wanted: dict[TurnId, tuple[SessionId | None, Packed]] = {}

    def handle(self, event: Event, now: float) -> None:
        """Make room for all of the prompt of a turn that arrives, then handle the event."""
        if isinstance(event, TurnArrived):
            self._wanted[event.turn_id] = event.session_id, event.tokens
            self._make_room()
        elif isinstance(event, TurnEnded | TurnGone):
            self._wanted.pop(event.turn_id, None)
        super().handle(event, now)

    def look(self, now: float) -> None:
        """Make room for the next turn in the queue, which may lack some still after a step."""
        self._make_room()
        super().look(now)

    def _make_room(self) -> None:
        cache = self.state.cache
        head, needed = self._largest()
        needed += ANSWER_BLOCKS * (1 + len(cache.running))
        while (short := needed - cache.occupancy.obtainable_blocks()) > 0:
            victim = self._least_recent(head)
            if victim is None:
                return
            free_session(cache, victim.session_id, short_blocks=short)

    def _largest(self) -> tuple[SessionId | None, int]:
        """Return the session of the waiting turn that lacks most, and the blocks that it lacks."""
        cache = self.state.cache
        size = cache.layout.block_tokens
        session, most = None, 0
        for turn_id, (name, prompt) in self._wanted.items():
            if turn_id not in cache.running:
                lacking = len(prompt) // TOKEN_BYTES
                slot = cache.sessions.get(name) if name is not None else None
                if slot is not None and slot.pin is not None:
                    lacking -= cache.match(prompt).range_tokens
                if lacking >= most:
                    session, most = name, lacking
        return session, -(-most // size)

    def _least_recent(self, head: SessionId | None) -> SessionView | None:
        waiting = {session for session, _ in self._wanted.values()}
        idle = [
            session
            for session in self.state.cache.sessions
            if session.pin is not None and not session.running and session.session_id != head
        ]
        return min(idle, key=lambda one: (one.session_id in waiting, one.last_s), default=None)


def free_session(cache: HeteroCache, session_id: SessionId, *, short_blocks: int) -> None:
    """Free all that only this session holds at once, though `short_blocks` would do."""
    own = min(cache.sessions.release(session_id), cache.occupancy.evictable_blocks())
    if own > 0:
        cache.pressure.evict_blocks(own, wanted=min(own, max(0, short_blocks)))


# -- seed 003: transfers -----------------------------------------------------------------------

Backup = Literal["keep", "release-after-transfer"]
"""What a prefill worker does with a session's state once it was sent."""


class PdTransfers(Transfers):
    """These transfers run at most `in_flight` at once (0: no limit); the source's copy is kept, or
    released. A prompt is sent when all of it is computed."""

    def __init__(self, heap: Heap, *, timeout_s: float, in_flight: int, backup: Backup) -> None:
        super().__init__(PeerNetwork(heap), timeout_s=timeout_s)
        self._limit = in_flight
        self._backup = backup
        self._sending = 0
        self._queued: deque[tuple[SimWorker, SimWorker, SimSequence, Then, float]] = deque()
        self._clock = heap

    def follow(
        self, source: SimWorker, target: SimWorker, sequence: SimSequence, now: float
    ) -> None:
        """Send nothing yet: as the seed has it, a prompt goes as a whole."""

    def send(
        self, source: SimWorker, target: SimWorker, sequence: SimSequence, *, then: Then, now: float
    ) -> None:
        """Have a computed prompt come as the base does, after waiting for a free slot."""
        if self._limit and self._sending >= self._limit:
            self._queued.append((source, target, sequence, then, now))
            return
        self._send_now(source, target, sequence, then=then, asked_s=now, now=now)

    def _send_now(
        self,
        source: SimWorker,
        target: SimWorker,
        sequence: SimSequence,
        *,
        then: Then,
        asked_s: float,
        now: float,
    ) -> None:
        self._sending += 1
        sent = partial(self._sent, source, target, sequence.turn.prompt, then, now - asked_s)
        super().send(source, target, sequence, then=sent, now=now)

    def _sent(
        self,
        source: SimWorker,
        target: SimWorker,
        prompt: Packed,
        then: Then,
        queued_s: float,
        brought: TransferResult,
        now: float,
    ) -> None:
        self._sending -= 1
        if self._backup == "release-after-transfer":
            # Told behind the return of the lend, which keeps all of it.
            forget = partial(_forget_at, source.cache, prompt)
            self.network.say(target.host, source.host, forget, now)
        waited_s = brought.waited_s + queued_s
        then(msgspec.structs.replace(brought, waited_s=waited_s), now)
        if self._queued:
            source, target, sequence, then, asked_s = self._queued.popleft()
            begin = partial(self._send_now, source, target, sequence, then=then, asked_s=asked_s)
            self._clock.at(now, lambda at_s: begin(now=at_s))


def _forget_at(cache: HeteroCache, prompt: Packed, now: float) -> None:
    """Forget the prompt at an instant of the heap's."""
    _forget(cache, prompt)


def _forget(cache: HeteroCache, prompt: Packed) -> None:
    """Release the session that stands on `prompt`, and what it alone holds."""
    for session in cache.sessions:
        resident = cache.residents.tokens_of(session.session_id)
        if resident and not session.running and prompt.startswith(resident):
            free_session(cache, session.session_id, short_blocks=session.depth)
            return


def pd_transfers(in_flight: int, backup: Backup) -> Callable[[Heap, float], Transfers]:
    """Return the maker of such transfers, for a baseline's parts."""
    return lambda heap, timeout_s: PdTransfers(
        heap, timeout_s=timeout_s, in_flight=in_flight, backup=backup
    )


# -- seed 003: the router ----------------------------------------------------------------------

DIRECT_MOST_TOKENS = 8192
"""What a turn may add to be appended at D itself; a larger one is prefilled on P and sent again."""


class SlotRouter:
    """The router gives sessions slots on D workers, first come first served, and they keep them.

    A turn whose session has a slot is appended there (the fast path). Else a slot is taken on the
    D worker with the fewest, if one is left, and the prompt is prefilled on P and sent; without
    one the turn falls back to plain PD and leaves nothing behind. `slots`: the hard cap of v3 and
    v4. None: the worker's word decides (v5): a slot wherever the prompt fits its free memory.
    """

    needs = NEEDS

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._home: dict[SessionId, int] = {}
        self._taken: dict[int, int] = {}

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        home = self._home_of(request, fleet)
        if home is not None:
            added = request.prompt_tokens - request.cached_on(home)
            if added <= DIRECT_MOST_TOKENS:
                return run_at(request, home, DispatchReason.OWNER)
            return self._split(request, fleet, home)
        worker = self._slot(request, fleet)
        if worker is None:
            return self._split(request, fleet, fleet.least_one())
        if request.session is not None:
            self._home[request.session] = worker.order
            self._taken[worker.order] = self._taken.get(worker.order, 0) + 1
        return self._split(request, fleet, worker)

    def _home_of(self, request: RoutingRequest, fleet: Candidates) -> Worker | None:
        if request.session is None:
            return None
        order = self._home.get(request.session)
        home = next((worker for worker in fleet if worker.order == order), None)
        if home is None or self._slots is not None or request.cached_on(home):
            return home
        # The worker let the session go: its slot is free for whoever asks first.
        del self._home[request.session]
        self._taken[home.order] -= 1
        return None

    def _slot(self, request: RoutingRequest, fleet: Candidates) -> Worker | None:
        """Return the D worker that gives the session a slot; None when none does.

        With a cap it is the one with the fewest sessions, without one the one with the most free
        memory that takes the prompt.
        """
        worker = min(fleet, key=lambda one: (self._taken.get(one.order, 0), one.order))
        if self._slots is not None:
            return worker if self._taken.get(worker.order, 0) < self._slots else None
        need = request.prompt_tokens * worker.profile.speed.kv_bytes_per_token
        roomy = [one for one in fleet if one.load.kv_bytes_free >= need]
        return max(roomy, key=lambda one: (one.load.kv_bytes_free, -one.order), default=None)

    def _split(self, request: RoutingRequest, fleet: Candidates, worker: Worker) -> Decision:
        """Prefill on the P worker that holds most of it, else the least loaded; send what lacks."""
        able = prefillers(worker, [*request.prefill_holders(fleet), *fleet.least_prefill(2)])
        if not able:
            return start_at(request, worker)
        prefill = max(able, key=request.cached_on)
        lacking = request.prompt_tokens - request.cached_on(worker)
        return split_over(request, worker, prefill, moved_tokens=lacking)
