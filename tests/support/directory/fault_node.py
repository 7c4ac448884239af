"""A worker's node in a fault schedule: NodeState over a small cache, and a store that misbehaves.

    turn --Admission--> Arrived --NodeState--> Start --begin ... finish--> Ended
                           |                     `- no room --> Gone
                           `-- Find, Fetch, Copy: answered late, twice, wrong, in any order, never

`tests/node`'s driver performs the effects; its slots hold the names of what belongs there, so
wrong state shows whoever made the mistake. One `Node` is one life: what is in memory dies with
it, and the `Store` too unless it is a disk. What must hold, besides all books of node and cache:
a turn starts once, and in time; a turn that was let in ends, is given up for a reason, or
dies with its process;
what a turn goes on from, and what is resident, is what its tokens say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import ParamSpec, Protocol

import msgspec

from ownerserve.cache.effects import SavePoint
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.kv.wire.rpc import Reject, Seed
from ownerserve.node.admission import Admission, Levels, PlaceTaken
from ownerserve.node.vocabulary.events import (
    Event,
    Fetch,
    FindRecords,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.records import Inside
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.format.model import Meta
from tests.support.directory.fault_net import LostRequest, Net, Violation
from tests.support.node.node_driver import LAYOUT, B, NodeDriver, truth

TICK_S = 0.3
ROOM_WAIT_S, DEADLINE_S = 0.5, 0.6
TICKS_MAX = round((ROOM_WAIT_S + DEADLINE_S) / TICK_S) + 2
"""A turn starts after so many ticks at most: it waits for room, then for its state."""
SETTINGS = NodeSettings(
    record_blocks=2,
    spill_after_s=0.05,
    restore_deadline_s=DEADLINE_S,
    room_wait_s=ROOM_WAIT_S,
    copy_bytes_a_tick=4096,
)
MARKS = Watermarks(low=0.2, high=0.5, idle_s=0.1)
BLOCKS, POINTS = 24, 6
WAITING_MAX = 3
NO_ROOM = "no_room"
HUNG_UP = "hung_up"

P = ParamSpec("P")


class Below(StrEnum):
    """What a schedule's workers have below their devices."""

    HOST = "host"  # dies with the process
    DISK = "disk"
    SHARED = "shared"  # one for all workers


class Store:
    """Records by id, and the boundaries inside them."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.metas: dict[bytes, Meta] = {}
        self._inside: dict[bytes, dict[bytes, int]] = {}  # boundary -> id -> units up to it

    def list_boundaries(self, meta: Meta) -> None:
        """A record of one block is found by its id alone."""
        ends = meta.boundaries + meta.prefix_hash if meta.boundaries else b""
        for units in range(1, len(ends) // 32 + 1):
            self._inside.setdefault(ends[32 * units - 32 : 32 * units], {})[meta.id] = units

    def inside(self, boundary: bytes) -> tuple[Inside, ...]:
        found = self._inside.get(boundary, {})
        return tuple(
            Inside(self.metas[id_], units, boundary)
            for id_, units in found.items()
            if id_ in self.records
        )


class Bad(msgspec.Struct, frozen=True):
    """How badly a schedule's stores answer, until all heals."""

    lost: float
    doubled: float
    failed: float
    slowest_s: float


class Life(Protocol):
    """The process that a node is in."""

    def deliver(self, action: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Do it, unless the process is dead, and once it is not paused."""
        ...

    def started(self, turn_id: TurnId) -> None:
        """The turn may run."""
        ...


class Job(msgspec.Struct, eq=False):
    """A turn at its node, an owner's or a guest's. `begun` once it runs."""

    event: TurnArrived
    session_id: SessionId
    output: Packed
    ticks: int = 0
    begun: Begun | None = None


class Node(NodeDriver):
    """One life."""

    def __init__(self, net: Net, bad: Bad, store: Store, *, life: Life) -> None:
        super().__init__(blocks=BLOCKS, points=POINTS, settings=SETTINGS)
        self.watermarks(MARKS)
        self.stored, self.metas = store.records, store.metas
        self.counts: Counter[str] = Counter()
        self.jobs: dict[TurnId, Job] = {}
        self._net = net
        self._bad = bad
        self._store = store
        self._life = life
        self._admission = Admission(self.cache.sessions)
        self._let_in = self._over = 0

    # ---- a turn

    def admit(self, job: Job) -> str | None:
        """Let it in, or say why not. It is to run when it is `started`."""
        event, now_s, rooms = job.event, self._net.now_s, self.cache.occupancy
        levels = Levels(
            waiting=len(self.waiting),
            max_waiting=WAITING_MAX,
            pending_prefill_tokens=0,
            room_tokens=(rooms.blocks.free + rooms.evictable_blocks()) * B,
            sequence_tokens=BLOCKS * B,
        )
        wanted = Seed((len(event.tokens) + len(job.output)) // TOKEN_BYTES)
        answer = self._admission.reserve(event.turn_id, wanted, levels=levels, now=now_s)
        if isinstance(answer, Reject):
            self.counts[f"refused {answer.reason}"] += 1
            return answer.reason
        came = self._admission.arrived(answer.reservation, now_s)
        if not isinstance(came, PlaceTaken) or came.turn_id != event.turn_id:
            raise Violation(f"the place of {event.turn_id} is another's")
        self._let_in += 1
        self.jobs[event.turn_id] = job
        self.waiting[event.turn_id] = event
        self.tell(event)
        return None

    def begin(self, turn_id: TurnId) -> bool:
        """The engine takes the turn up; False when there is no room."""
        job, now_s = self.jobs[turn_id], self._net.now_s
        event, session_id = job.event, job.session_id
        resume = self.state.resume(event.tokens)
        begun = self.cache.begin(Turn(turn_id, session_id, event.tokens), now_s, resume=resume)
        if not isinstance(begun, Begun):
            self.give_up(turn_id, NO_ROOM)
            return False
        self._check_state(begun, resume, event.tokens)
        count = (len(event.tokens) + len(job.output)) // TOKEN_BYTES
        job.begun = begun
        if isinstance(self.cache.reserve(turn_id, count, now_s), NoRoom):
            self.give_up(turn_id, NO_ROOM)
            return False
        return True

    def finish(self, turn_id: TurnId) -> None:
        """It has run: prompt and output are in the slots, and the node is told."""
        job, now_s = self.jobs.pop(turn_id), self._net.now_s
        assert job.begun is not None
        tokens, begun = job.event.tokens + job.output, job.begun
        prompt, count = len(job.event.tokens) // TOKEN_BYTES, len(tokens) // TOKEN_BYTES
        table = self.cache.table(turn_id)
        for block in range(begun.write_floor // B, count // B):
            written = tokens[: (block + 1) * B * TOKEN_BYTES]
            for name in LAYOUT.range_names:
                self.slots[name, table.range[name][block]] = truth(name, written)
        position = begun.restored
        stops = {(prompt - 1) // B * B, prompt // B * B, count // B * B, count}
        for stop in sorted(at for at in stops if at > position):
            part = tokens[position * TOKEN_BYTES : stop * TOKEN_BYTES]
            self.cache.advance(turn_id, part, now_s)
            position = stop
            if stop % B == 0 and stop >= begun.write_floor:
                for effect in self.cache.snapshot(turn_id, now_s):
                    assert isinstance(effect, SavePoint)
                    for name, slot in effect.slots.items():
                        self.slots[name, slot] = truth(name, tokens[: stop * TOKEN_BYTES])
        self.cache.finish(turn_id, now_s)
        self._over += 1
        self.counts["turns run"] += 1
        self.counts["of them resumed"] += begun.restored > 0
        self.tell(TurnEnded(turn_id, begun.restored, prompt, count))

    def give_up(self, turn_id: TurnId, reason: str) -> None:
        """It will not run, or not to its end."""
        job = self.jobs.pop(turn_id)
        self.waiting.pop(turn_id, None)
        if turn_id in self.cache.running:
            self.cache.abort(turn_id, self._net.now_s)
        self._over += 1
        self.counts[f"given up {reason}"] += 1
        self.tell(TurnGone(job.event.turn_id))

    # ---- events, effects and their answers

    def tell(self, event: Event) -> None:
        """Something happened; what the node wants done is on its way when this returns."""
        self.now = self._net.now_s
        self.handle(event)
        self._perform()

    def tick(self) -> None:
        """Let time pass, when anything is due."""
        due_s, now_s = self.state.next_due(), self._net.now_s
        if due_s is not None and due_s <= now_s:
            self.tell(Tick())
        for turn_id in self.waiting:
            self.jobs[turn_id].ticks += 1
            if self.jobs[turn_id].ticks > TICKS_MAX:
                raise LostRequest(f"{turn_id} was let in and is not started in time")
        if self._let_in != self._over + len(self.jobs):
            raise Violation(f"{self._let_in} turns in, {self._over} over, {len(self.jobs)} live")

    def _perform(self) -> None:
        started, self.started = self.started, []
        for turn_id in started:
            job = self.jobs.get(turn_id)
            if job is None or self.waiting.pop(turn_id, None) is None:
                raise Violation(f"{turn_id} is started again, or after it was given up")
            self.counts[f"restore {self.reports.pop(turn_id).outcome}"] += 1
        while self.pending:
            self._ask_store(self.pending.popleft())
        for turn_id in started:
            self._life.started(turn_id)

    def _ask_store(self, asked: FindRecords | Fetch | StoreCopy) -> None:
        net, bad, rng = self._net, self._bad, self._net.rng
        if net.now_s >= net.heal_s:
            net.after(0.002, partial(self._life.deliver, self._answered, asked, self.answer))
            return
        if not isinstance(asked, StoreCopy) and rng.random() < bad.lost:
            self.counts["answers lost"] += 1
            return
        how = self.fail if rng.random() < bad.failed else self.answer
        for _ in range(1 + (rng.random() < bad.doubled)):
            answer = partial(self._life.deliver, self._answered, asked, how)
            net.after(rng.uniform(0.0005, bad.slowest_s), answer)

    def _answered(
        self,
        asked: FindRecords | Fetch | StoreCopy,
        how: Callable[[FindRecords | Fetch | StoreCopy], None],
    ) -> None:
        self.now = self._net.now_s
        how(asked)
        self._perform()

    def answer(self, asked: FindRecords | Fetch | StoreCopy) -> None:
        if isinstance(asked, StoreCopy):
            self._store.list_boundaries(asked.meta)
        super().answer(asked)

    def _at_boundary(self, digest: bytes) -> tuple[Inside, ...]:
        return self._store.inside(digest)

    # ---- what goes wrong

    def press(self) -> None:
        """All room that can be had is wanted at once."""
        self.counts["devices emptied"] += 1
        self.forget_device()

    def lose_record(self) -> None:
        """The store loses one record: of its set the others remain."""
        if self.stored:
            self.counts["records lost"] += 1
            del self.stored[self._net.rng.choice(sorted(self.stored))]

    def at_rest(self) -> None:
        """Nothing is under way any more."""
        self.check()
        if self.jobs or self.cache.running or self.cache.ingest.counts() != (0, 0):
            raise Violation(f"{list(self.jobs)} are left at rest")
