"""A `NodeRuntime` performs a NodeState's effects with an engine and a store.

The class owns operations under way: which ticket of the store belongs to which, and the bytes
between store and slots. It decides nothing. It is called on the thread that owns the cache, and
never waits for a medium. `EnginePort` is all that it knows of an engine.

A `Calibration` learns what effects and steps took: it finds the cost model beside the store, feeds
it while serving, and writes it back. It owns one file; what it can't read it starts anew: prices
are a cache, never a truth.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec

from ownerserve.cache.outcomes import Resume
from ownerserve.cache.pressure import Checkpoint
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import Packed
from ownerserve.node.state import NodeState
from ownerserve.node.storage.backing import (
    MEDIUM_OF,
    Backing,
    ListedPart,
    NodeTiers,
    PeerTier,
)
from ownerserve.node.storage.journal import Journal
from ownerserve.node.vocabulary.engine_port import EnginePort
from ownerserve.node.vocabulary.events import (
    CallOffPrefill,
    CameIn,
    DropOperation,
    Effect,
    Event,
    Fetch,
    Fetched,
    Fill,
    Filled,
    FindRecords,
    Forget,
    Kept,
    Locate,
    Located,
    MoveSlots,
    NotFetched,
    NotKept,
    OperationId,
    PutAway,
    RecordsFound,
    Remember,
    Remembered,
    RestoreReport,
    Start,
    StoreCopy,
    Tick,
)
from ownerserve.node.vocabulary.records import Inside, Tip
from ownerserve.node.vocabulary.settings import BRINGS_AT_ONCE
from ownerserve.plan.cost.events import Loaded, Observation
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.explain import summary
from ownerserve.store.format.model import (
    AlreadyStored,
    Meta,
    MissReason,
    ReadHit,
    ReadMiss,
    ReadPart,
    WriteDone,
)
from ownerserve.store.service.runtime import NotYet, Ticket
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.remote import RemoteTier

log = logging.getLogger("ownerserve.node")

POLL_S = 0.001
"""How often the store's answers are looked for while the engine has nothing else to do."""


class Writing(msgspec.Struct, eq=False):
    """A `Writing` is a copy on its way into the store; it keeps its `payload` until the store has
    room for it."""

    meta: Meta
    payload: memoryview | None


class NodeRuntime:
    """A `NodeRuntime` runs one node. `handle` and `poll` return the turns that may run now."""

    def __init__(
        self,
        state: NodeState,
        engine: EnginePort,
        *,
        backing: Backing,
        calibration: Calibration,
        journal: Journal | None = None,
    ) -> None:
        """Make the runtime and tell the node what the journal remembers. `journal` None: there is
        no drive, and nothing is kept for a later life."""
        self.state = state
        self._engine = engine
        self._backing = backing
        self._store = backing.service
        self.calibration = calibration
        self._journal = journal
        self._asked: dict[OperationId, tuple[Ticket, FindRecords | Fetch | Locate]] = {}
        self._parts: dict[OperationId, tuple[ReadPart, ...]] = {}
        self._writing: dict[OperationId, tuple[Ticket, Writing]] = {}
        self.came_in: Callable[[CameIn], None] = lambda end: None
        """Hears of each session whose state was brought, how that ended (comings.py)."""
        self.put_away: Callable[[SessionId], None] = lambda session_id: None
        """Hears of each session that was to be put away that it is (comings.py)."""
        self._to_checkpoint: list[TurnId] = []
        self.stored_bytes = 0
        if journal is not None and journal.found:
            self.handle(Remembered(journal.found), time.monotonic())

    def add_peers(self, peers: PeerTier, brings: int = BRINGS_AT_ONCE) -> NodeTiers:
        """Bring from other workers too, for `brings` turns at once beside what the store reads, and
        return the tiers, of which they may read; call it before the node runs."""
        self._backing.add_peers(peers, brings)
        return self._backing.tiers

    # -- the engine's side ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[TurnId]:
        """Tell the node the event, perform its effects, and return the turns that may run now."""
        return self._perform(self.state.handle(event, now), now)

    def poll(self, now: float) -> list[TurnId]:
        """Take what the store has answered, let time pass, and return the turns that may run
        now."""
        started: list[TurnId] = []
        for operation_id, (ticket, asked) in list(self._asked.items()):
            answer = self._store.poll(ticket)
            if not isinstance(answer, NotYet):
                del self._asked[operation_id]
                if (event := self._event(operation_id, asked, answer)) is not None:
                    started += self.handle(event, now)
        for operation_id, (ticket, writing) in list(self._writing.items()):
            self._advance(operation_id, ticket, writing, now)
        if (lost := self._backing.tiers.losses.take()) is not None:
            started += self.handle(lost, now)
        self.calibration.observe(_taken(self._backing.tiers.timings))
        if (peers := self._backing.tiers.peers) is not None:
            self.calibration.observe(_taken(peers.timings))
        self.calibration.save_if_due(now)
        started += self.handle(Tick(), now)
        return started

    @property
    def tiers(self) -> Mapping[Tier, int | None]:
        """`tiers` are the media of the store, with the bytes that each may hold; None: not
        known."""
        return self._backing.sizes

    @property
    def upkeep_counts(self) -> Mapping[str, int]:
        """`upkeep_counts` tells what the store's upkeep has done so far."""
        return self._backing.upkeep.counts

    @property
    def remote_counts(self) -> Counter[str] | None:
        """`remote_counts` are the running counts of the shared medium; None: there is none."""
        remote = (tier for tier in self._backing.tiers.tiers if isinstance(tier, RemoteTier))
        return next((tier.counters for tier in remote), None)

    def checkpoints(self) -> Sequence[TurnId]:
        """Take the turns that are to be snapshot at their next boundary; each is given once."""
        turns, self._to_checkpoint = self._to_checkpoint, []
        return turns

    def wait_s(self, now: float) -> float | None:
        """Return how many seconds an idle engine may sleep before the next `poll`; None: until
        something comes."""
        if self._asked or self._writing:
            return POLL_S
        due, every_s = self.state.next_due(), self._backing.upkeep.every_s
        wait_s = None if due is None else max(0.0, due - now)
        if not every_s:
            return wait_s
        return every_s if wait_s is None else min(wait_s, every_s)  # what upkeep removed is told

    def resume(self, tokens: Packed) -> Resume | None:
        """Decide how to begin a turn of `tokens` now; None: as the cache does by itself."""
        return self.state.resume(tokens)

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """Take the report of the turn's restore; None where there is none, or it was taken."""
        report = self.state.report(turn_id)
        if report is not None and report.plan is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s: %s", turn_id, report.outcome, summary(report.plan))
        return report

    def observe(self, seen: Observation) -> None:
        """Learn from a pass or a wait that was measured."""
        self.calibration.observe((seen,))

    def close(self, now: float, *, within_s: float) -> None:
        """Copy idle sessions for up to `within_s` seconds, write costs and journal, and close the
        store."""
        self.state.idle_spills.hurry()
        until = time.monotonic() + within_s
        self.handle(Tick(), now)
        while (self.state.is_busy or self._writing) and time.monotonic() < until:
            self.poll(now)
            time.sleep(POLL_S)
        self.calibration.save()
        if self._journal is not None:
            self._journal.close()
        self._backing.close()

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect], now: float) -> list[TurnId]:
        """Perform effects, and those that follow from them; returns the turns to start."""
        started: list[TurnId] = []
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case Start(turn_id):
                    started.append(turn_id)
                case FindRecords(operation_id, ids, deadline_s, boundaries, tenant, peer):
                    until_s = time.time() + deadline_s - now  # the store's clock is the wall's
                    look = partial(
                        self._backing.tiers.sighted, ids, boundaries, tenant=tenant, peer=peer
                    )
                    ticket = self._store.submit_look(look, deadline_s=until_s)
                    self._asked[operation_id] = (ticket, effect)
                case Fetch(operation_id, wants, deadline_s, turn_id, computed):
                    until_s = time.time() + deadline_s - now
                    if (peers := self._backing.tiers.peers) is not None:
                        peers.expect(wants, turn_id, computed)
                    ticket = self._store.submit_read(wants, deadline_s=until_s)
                    self._asked[operation_id] = (ticket, effect)
                case DropOperation(operation_id):
                    asked = self._asked.pop(operation_id, None)
                    if asked is not None:
                        self._drop(*asked)
                    self._parts.pop(operation_id, None)
                    self._forget_copy(operation_id)
                case CameIn():
                    self.came_in(effect)
                case PutAway(session_id):
                    self.put_away(session_id)
                case CallOffPrefill(turn_id):
                    if (peers := self._backing.tiers.peers) is not None:
                        peers.call_off(turn_id)
                case MoveSlots(moves):
                    self._engine.apply(moves)
                case Fill():
                    waiting.extend(self.state.handle(self._fill(effect), now))
                case StoreCopy():
                    self._copy(effect)
                case Checkpoint(turns):
                    self._to_checkpoint += turns
                case Locate(operation_id, ids, deadline_s):
                    until_s = time.time() + deadline_s - now
                    locate = partial(self._backing.tiers.located, ids)
                    ticket = self._store.submit_look(locate, deadline_s=until_s)
                    self._asked[operation_id] = (ticket, effect)
                case Remember(tip) if self._journal is not None:
                    self._journal.write(tip)
                case Forget(session_id) if self._journal is not None:
                    self._journal.write(Tip(session_id, 0))
        return started

    def _drop(self, ticket: Ticket, asked: FindRecords | Fetch | Locate) -> None:
        """Give a question up; what a peer brings for nobody else is not brought any more."""
        abandoned, peers = self._store.cancel(ticket), self._backing.tiers.peers
        if abandoned is not None and peers is not None and isinstance(asked, Fetch):
            peers.give_up(asked.wants)

    def _fill(self, fill: Fill) -> Filled:
        parts = self._parts.pop(fill.operation_id)
        for filling in fill.fillings:
            data = parts[filling.part].data
            self._engine.write_slots(filling.component, filling.slots, data)
        return Filled(fill.operation_id, tuple(part.meta.id for part in parts))

    def _copy(self, copy: StoreCopy) -> None:
        payload = self._engine.read_slots(copy.component, copy.slots)
        self._backing.tiers.record_value_ms[copy.meta.id] = copy.restore_cost_ms
        ticket = self._store.submit_reserve(copy.meta, len(payload))
        self._writing[copy.operation_id] = (ticket, Writing(copy.meta, payload))

    def _forget_copy(self, operation_id: OperationId) -> None:
        """Give up a copy that nobody waits for any more. One that is being committed may become
        durable."""
        ticket, writing = self._writing.pop(operation_id, (None, None))
        if ticket is not None and writing is not None:
            self._store.cancel(ticket)
            self._backing.tiers.record_value_ms.pop(writing.meta.id, None)

    # -- answers -------------------------------------------------------------------------------

    def _event(
        self, operation_id: OperationId, asked: FindRecords | Fetch | Locate, answer: object
    ) -> Event | None:
        """Return the event that the store's answer is to the node; None for a look that timed out:
        the node has a deadline of its own, and must not take silence for an empty store."""
        if isinstance(asked, Locate):
            found = answer if isinstance(answer, Mapping) else {}
            return Located(operation_id, {MEDIUM_OF[tier]: ids for tier, ids in found.items()})
        match answer:
            case ReadMiss(reason) if isinstance(asked, FindRecords):
                return None if reason is MissReason.DEADLINE else RecordsFound(operation_id, {})
            case ReadHit(parts):
                self._parts[operation_id] = parts
                return Fetched(operation_id)
            case ReadMiss(reason, id_):
                return NotFetched(operation_id, reason, id_)
            case Mapping():
                assert isinstance(asked, FindRecords)
                inside = tuple(
                    Inside(item.meta, item.units, item.boundary)
                    for seen in answer.values()
                    if isinstance(item := seen.listed, ListedPart)
                )
                held = {id_: seen.near for id_, seen in answer.items()}
                ready_ms = max((seen.ready_ms for seen in answer.values()), default=0.0)
                return RecordsFound(operation_id, held, inside, ready_ms)
            case _:
                assert isinstance(asked, Fetch)
                return NotFetched(operation_id, MissReason.BUSY)

    def _advance(
        self, operation_id: OperationId, ticket: Ticket, writing: Writing, now: float
    ) -> None:
        """Take a copy's next step (room -> bytes -> durable), and tell the node when it ends."""
        answer = self._store.poll(ticket)
        match answer:
            case NotYet():
                return
            case Reservation():
                assert writing.payload is not None
                answer.payload[:] = writing.payload
                writing.payload = None
                self._writing[operation_id] = (self._store.submit_commit(answer), writing)
                return
            case WriteDone(stored_bytes=count):
                self.stored_bytes += count
        del self._writing[operation_id]
        kept = isinstance(answer, WriteDone | AlreadyStored)
        self._backing.tiers.record_value_ms.pop(
            writing.meta.id, None
        )  # not written, if it is still there
        self.handle(Kept(operation_id) if kept else NotKept(operation_id), now)


def _taken(timings: deque[Loaded]) -> Iterable[Observation]:
    while timings:
        yield timings.popleft()


# ---- what it took


SAVE_EVERY_S = 30.0
SAVE_WITHIN_S = 5.0
"""How long the last save waits for the drive."""

UNMEASURED = Defaults(
    "assumed for an unmeasured engine",
    Coefficients(5.0, 0.1, 1e-6),
    {
        Tier.HOST: Medium(0.05, 4e6),
        Tier.PEER: Medium(2.0, 1e6),
        Tier.DISK: Medium(0.5, 1e6),
        Tier.REMOTE: Medium(8.0, 1e5),
    },
)
"""A small CPU's order of magnitude; the first turns replace it."""


class Calibration:
    """A `Calibration` is a cost model and the file that it comes from and goes to; `path` None: it
    is not kept."""

    def __init__(self, path: Path | None, defaults: Defaults = UNMEASURED) -> None:
        self.model = _read(path, defaults)
        self._path = path
        self._observed = 0
        self._saved_s = 0.0
        self._writing: Thread | None = None

    def observe(self, seen: Iterable[Observation]) -> None:
        """Learn from what was measured just now; an item of 0 ms is no measurement, and an unknown
        tier's load is passed over."""
        at_s = time.time()
        for item in seen:
            if isinstance(item, Loaded) and item.tier not in self.model.tiers:
                continue
            if item.ms > 0.0:
                self.model.observe(item, at_s)
                self._observed += 1

    def save_if_due(self, now: float) -> None:
        """Write the file when something was learnt and SAVE_EVERY_S have passed; on a thread of its
        own, since a drive may be silent. While a write is under way, what is learnt waits."""
        if self._is_written(0.0) and (data := self.due(now)) is not None:
            self._begin(data)

    def due(self, now: float) -> bytes | None:
        """Return what `save_if_due` would write now, for a caller that must not write on its
        thread, and count it as written; None: nothing is due."""
        if self._path is None or not self._observed or now - self._saved_s < SAVE_EVERY_S:
            return None
        self._saved_s, self._observed = now, 0
        return self.model.dump()

    def save(self) -> None:
        """Write what was learnt since the last time and wait for it, SAVE_WITHIN_S at most."""
        until_s = time.monotonic() + SAVE_WITHIN_S
        if self._is_written(SAVE_WITHIN_S) and self._path is not None and self._observed:
            self._observed = 0
            self._begin(self.model.dump())
        if not self._is_written(max(0.0, until_s - time.monotonic())):
            log.warning("costs were not saved: %s does not answer", self._path)

    def _begin(self, data: bytes) -> None:
        self._writing = Thread(target=self.write, args=(data,), name="node-costs", daemon=True)
        self._writing.start()

    def _is_written(self, within_s: float) -> bool:
        """Return whether the last write has ended, or ends within `within_s` seconds."""
        if self._writing is None:
            return True
        self._writing.join(within_s)
        return not self._writing.is_alive()

    def write(self, data: bytes) -> None:
        """Write the file, all or nothing; on any thread. A failure loses what was learnt since the
        last time, and is logged."""
        if self._path is None:
            return
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.replace(self._path)
        except OSError as error:
            log.warning("costs were not saved: %s", error)


def _read(path: Path | None, defaults: Defaults) -> CostModel:
    if path is None:
        return CostModel(defaults)
    try:
        return CostModel.restore(path.read_bytes())
    except FileNotFoundError:
        return CostModel(defaults)
    except (OSError, InvalidInput) as error:
        log.warning("costs are measured anew: %s", error)
        return CostModel(defaults)
