"""A `Holding` says what this engine holds, session by session, in its store and in vLLM's pool: a
thread that looks and answers.

    scheduler's thread ── left, lost, missed, over ──> inbox ──> Residency ──> the store's index
                     └─── watch: tips, blocks taken ─> events ─> InPool ──┐
    RPC's thread ────────────── page(after) ─────────> inbox ──> Inventory ──> PageIs

vLLM's scheduler sleeps while it has no request, so this is a thread of its own. Owns the node's
inventory, a read-only view of each rank's index, and the file that a later life begins with.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import msgspec

from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.scheduler_side.in_pool import STIR_S, InPool, PoolEvents, PoolWatch
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.rpc import Admit, PageIs, Probe, RpcAnswer
from ownerserve.node.ownership.inventory import BELOW, Inventory, Residency
from ownerserve.node.ownership.news import NEWS_WAITERS
from ownerserve.node.restore.foretelling import planned_tokens
from ownerserve.node.storage.journal import Journal
from ownerserve.node.vocabulary.events import Forget, Locate, Located, RecordsLost, Remember
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import RecordNames, Tip
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.restore import Planner
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.seal import Keys

log = logging.getLogger("vllm.ownerserve")

PAUSE_S = 1.0
"""After a mistake of ours, and between two tries to open an index that is not there yet."""
JOIN_S = 5.0
NEVER_S = float("inf")

Chore = Callable[[], None]


class _AskedPage(msgspec.Struct, eq=False):
    """An `_AskedPage` is a question for the words above `after`, which waits for one until
    `until_s`."""

    after: int
    unit: RoutingUnit
    until_s: float
    answer: Future[RpcAnswer] = msgspec.field(default_factory=Future)


class Holding:
    """A `Holding` is the inventory of one engine's store. What is told never waits; `page` gives a
    future."""

    def __init__(
        self, names: RecordNames, directories: Sequence[Path], journal: Path, *, can_replay: bool
    ) -> None:
        """Start the thread. `directories` are the stores of the ranks, whose shards count together;
        `journal` is the file for a later life."""
        self._can_replay = can_replay
        self.inventory = Inventory()
        """Written by the thread alone."""
        self._operations = Operations()
        self.residency = Residency(names, self.inventory, self._operations, can_replay=can_replay)
        """The thread's alone."""
        self.prices: Prices | None = None
        """What reading took when that was told last; None: it was not."""
        self._shards = Shards(directories)
        self._events: PoolEvents = deque()
        self._in_pool: InPool | None = None
        self._planning: tuple[Planner, Prices] | None = None
        self._waiting: list[_AskedPage] = []
        self._journal: Journal | None = Journal(journal)
        self._inbox: Queue[Chore | None] = Queue()  # a SimpleQueue can sleep past its timeout
        found = self._journal.found
        self._tell(lambda: self.residency.remembered(found, _now()))
        self._thread = Thread(target=self._run, name="ownerserve-holding", daemon=True)
        self._thread.start()

    # -- told by the scheduler's thread --------------------------------------------------------

    def left(self, tips: Iterable[Tip]) -> None:
        """Tell that turns left sessions at `tips`, and all copies of them are answered for."""
        for tip in tips:
            self._tell(partial(self._left, tip))

    def lost(self, lost: RecordsLost) -> None:
        """Tell that records went from a rank's store."""
        self._tell(lambda: self._lost(lost))

    def missed(self, session_id: SessionId) -> None:
        """Tell that a restore of the session found less than was there."""
        self._tell(lambda: self.residency.missed(session_id, _now()))

    def over(self, session_id: SessionId) -> None:
        """Tell that the session has ended."""
        self._tell(lambda: self._forget(session_id))

    def renamed(self, names: RecordNames) -> None:
        """Go on under `names`; nothing from before is found under them or known to a later life."""
        self._tell(lambda: self._rename(names))

    def plans(self, planner: Planner, prices: Prices) -> None:
        """Tell that restores are planned by `planner`, at these prices from now on."""
        self._planning, self.prices = (planner, prices), prices

    def watch(self, shape: StateShape) -> PoolWatch:
        """Make what notes on the scheduler's thread what sessions have in vLLM's pool; `watches`
        follows."""
        return PoolWatch(shape, self._events, lambda: self._tell(self._look_at_the_pool))

    def watches(self, shape: StateShape, pool: Any) -> None:
        """Tell from now on what is in this pool, which the watch was bound to."""
        in_pool = InPool(shape, pool, inventory=self.inventory)

        def begin() -> None:
            self._in_pool = in_pool

        self._tell(begin)

    def close(self) -> None:
        """Stop the thread; what is to be written down is written first."""
        self._inbox.put(None)
        self._thread.join(JOIN_S)

    # -- asked by other threads -------------------------------------------------------------

    def page(self, after: int, unit: RoutingUnit, *, wait_s: float = 0.0) -> Future[RpcAnswer]:
        """Ask for a page of the words after number `after`, as `unit`'s; where there is none, of
        the next one, after `wait_s` seconds at the latest. The thread answers the future."""
        asked = _AskedPage(after, unit, _now() + wait_s)
        self._tell(lambda: self._say(asked))
        return asked.answer

    def run(self, work: Callable[[], object]) -> Future[object]:
        """Do the work on the thread, which owns `residency`; the future has what it returns."""
        answer: Future[object] = Future()

        def chore() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except Exception as error:
                    answer.set_exception(error)
                    raise

        self._tell(chore)
        return answer

    def admitted(self, admit: Admit, asked: Probe) -> Future[RpcAnswer]:
        """Ask to have it told with `admit` what is here of the session that is asked about, and
        what a turn would do with that; the thread answers the future."""
        answer: Future[RpcAnswer] = Future()
        self._tell(lambda: self._say_held(admit, asked, answer))
        return answer

    # -- the thread ----------------------------------------------------------------------------

    def _tell(self, chore: Chore) -> None:
        self._inbox.put(chore)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._round()
            except Exception:  # the root of this thread: who asks hears nothing of this once
                log.exception("what the store holds is not told; please report this")
                time.sleep(PAUSE_S)
        if self._journal is not None:
            self._journal.close()
        self._shards.close()

    def _round(self) -> bool:
        """Do what is due, then the next thing that was told; False: it is time to go."""
        self._look()
        due_s = self.residency.next_due()
        if self._waiting:  # what vLLM took is noted, and nobody is stirred by its last step
            until_s = min(one.until_s for one in self._waiting)
            due_s = min(until_s, _now() + STIR_S, NEVER_S if due_s is None else due_s)
        chore: Chore | None = self._answer_waiting
        with suppress(Empty):
            chore = self._inbox.get(timeout=None if due_s is None else max(0.0, due_s - _now()))
        if chore is not None:
            chore()
            self._write_down()
            self._answer_waiting()
        return chore is not None

    def _look(self) -> None:
        now = _now()
        for effect in self.residency.tick(now):
            assert isinstance(effect, Locate)
            held = self._shards.held(effect.ids)
            located = {} if held is None else {Tier.DISK: held}
            self._operations.complete(Located(effect.operation_id, located), now)
        self._write_down()

    def _write_down(self) -> None:
        for effect in self.residency.to_file():
            match effect:
                case Remember(tip) if self._journal is not None:
                    self._journal.write(tip)
                case Forget(session_id) if self._journal is not None:
                    self._journal.write(Tip(session_id, 0))

    def _left(self, tip: Tip) -> None:
        self.residency.copied(tip, _now())

    def _lost(self, lost: RecordsLost) -> None:
        self.residency.lost(lost, _now())

    def _look_at_the_pool(self) -> None:
        if self._in_pool is not None:
            self._in_pool.take(self._events)

    def _forget(self, session_id: SessionId) -> None:
        self.residency.forget(session_id)
        if self._in_pool is not None:
            self._in_pool.take(self._events)
            self._in_pool.forget(session_id)
        self.inventory.forget(session_id)

    def _rename(self, names: RecordNames) -> None:
        if self._in_pool is not None:
            self._in_pool.take(self._events)
            self._in_pool.clear()
        for session_id in {word.session for word in self.inventory}:
            self.inventory.forget(SessionId(session_id))
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self.residency = Residency(
            names, self.inventory, self._operations, can_replay=self._can_replay
        )

    def _say(self, asked: _AskedPage) -> None:
        self._waiting.append(asked)
        while len(self._waiting) > NEWS_WAITERS:
            self._answer_page(self._waiting.pop(0))

    def _answer_waiting(self) -> None:
        """Answer who asked for words that are there now, or has waited for long enough."""
        if not self._waiting:
            return
        self._look_at_the_pool()
        last, now = self.inventory.last, _now()
        due = [one for one in self._waiting if one.after != last or one.until_s <= now]
        self._waiting = [one for one in self._waiting if one not in due]
        for one in due:
            self._answer_page(one)

    def _answer_page(self, asked: _AskedPage) -> None:
        if asked.answer.set_running_or_notify_cancel():
            page = self.inventory.page(asked.after, incarnation=asked.unit.incarnation)
            asked.answer.set_result(PageIs(msgspec.structs.replace(page, rank=asked.unit.dp_rank)))

    def _say_held(self, admit: Admit, asked: Probe, answer: Future[RpcAnswer]) -> None:
        session_id = asked.session_id
        if session_id is None or not answer.set_running_or_notify_cancel():
            return
        self._look_at_the_pool()
        restorable = self.residency.restorable(session_id)
        resident = self.inventory.tokens(session_id, Tier.DEVICE) if self._in_pool else None
        planned = None
        if self._planning is not None and None not in (resident, restorable):
            stored = {tier: self.inventory.tokens(session_id, tier) for tier in BELOW}
            planned = planned_tokens(
                *self._planning, tokens=asked.wanted.tokens, resident=resident or 0, stored=stored
            )
        held = msgspec.structs.replace(
            admit, resident_tokens=resident, restorable_tokens=restorable, planned_tokens=planned
        )
        answer.set_result(held)


class Shards:
    """`Shards` are the indexes of all ranks' stores, read as their writers last committed them."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._snapshots: list[StoreSnapshot] = []
        self._tried_s = -PAUSE_S

    def held(self, ids: Sequence[bytes]) -> frozenset[bytes] | None:
        """Return which of `ids` every rank has; None: one of them does not answer now."""
        if not self._open():
            return None
        held = frozenset(ids)
        for snapshot in self._snapshots:
            here = snapshot.standing(ids)
            if here is None:
                return None
            held &= here
        return held

    def close(self) -> None:
        """Close the indexes."""
        for snapshot in self._snapshots:
            snapshot.close()

    def _open(self) -> bool:
        """Open the indexes that are missing, every PAUSE_S at most; return whether all are open. A
        store may not be there yet: its writer makes it."""
        missing = self._directories[len(self._snapshots) :]
        if missing and _now() - self._tried_s >= PAUSE_S:
            self._tried_s = _now()
            try:
                for directory in missing:
                    self._snapshots.append(StoreSnapshot(directory, keys=Keys()))
            except (OwnerServeError, OSError) as error:
                log.info("no store to look in yet: %s", error)
        return len(self._snapshots) == len(self._directories)


def _now() -> float:
    return time.monotonic()
