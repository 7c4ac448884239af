"""A Hypothesis machine over NodeState with a store that answers late, wrong, twice or never.

Whatever happens: every turn starts exactly once, every resident slot holds what its tokens say,
nothing stays reserved, a turn reserves no more than a part, and the books of cache and node agree
after every step.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from ownerserve.node.vocabulary.events import (
    Fetch,
    Fetched,
    FindRecords,
    Kept,
    NotFetched,
    NotKept,
    Tick,
    TurnGone,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.format.model import MissReason
from tests.support.node.node_driver import B, NodeDriver

SETTINGS = NodeSettings(
    record_blocks=2,
    spill_after_s=0.5,
    restore_deadline_s=3.0,
    room_wait_s=2.0,
    copy_bytes_a_tick=128,
    part_tokens=2 * B,
    step_tokens=B,
)


class NodeMachine(RuleBasedStateMachine):
    """Sessions of a few branches over a small device."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = NodeDriver(blocks=20, points=6, settings=SETTINGS)
        self.driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=0.4))
        self.driver.is_slow = True
        self.answered: list[FindRecords | Fetch] = []
        self.arrived = 0
        self.ran: list[TurnId] = []
        self.given_up: set[TurnId] = set()
        self.running: list[TurnId] = []

    @rule(
        session=st.sampled_from(["a", "b", None]),
        stem=st.integers(0, 2),
        shared=st.integers(1, 6 * B),
        own=st.integers(0, 2 * B),
    )
    def arrive(self, session: str | None, stem: int, shared: int, own: int) -> None:
        self.arrived += 1
        tokens = [*range(stem * 1000, stem * 1000 + shared), *[7000 + self.arrived] * own]
        self.driver.arrive(tokens, session)

    @rule(
        session=st.sampled_from(["a", "b", "c"]),
        stem=st.integers(0, 2),
        blocks=st.integers(1, 5),
        works=st.sampled_from([True, True, False]),
    )
    def whole_turn(self, session: str, stem: int, blocks: int, works: bool) -> None:
        """From arrival to end, while the store answers all that was asked so far, or fails."""
        self.arrived += 1
        turn_id = self.driver.arrive(range(stem * 1000, stem * 1000 + blocks * B + 1), session)
        while self.driver.pending:
            asked = self.driver.pending.popleft()
            (self.driver.answer if works else self.driver.fail)(asked)
            while self.driver.writes:
                self.driver.write()
        if turn_id in self.driver.started:  # else it waits for the room of those that are
            self.run_one(turn_id)

    @precondition(lambda self: self.driver.pending)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def store_answers(self, data: st.DataObject, works: bool) -> None:
        """Any operation, in any order."""
        at = data.draw(st.integers(0, len(self.driver.pending) - 1))
        asked = self.driver.pending[at]
        del self.driver.pending[at]
        (self.driver.answer if works else self.driver.fail)(asked)
        if isinstance(asked, FindRecords | Fetch):
            self.answered.append(asked)

    @precondition(lambda self: self.driver.writes)
    @rule()
    def bytes_come(self) -> None:
        """Into slots that their turn may have given up since."""
        self.driver.write()

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def store_repeats_itself(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.answered))
        operation_id = asked.operation_id
        for event in (
            Fetched(operation_id),
            NotFetched(operation_id, MissReason.CORRUPT),
            Kept(operation_id),
        ):
            self.driver.handle(event)
        self.driver.handle(NotKept(operation_id))

    @precondition(lambda self: self.driver.stored)
    @rule(data=st.data())
    def store_loses_a_record(self, data: st.DataObject) -> None:
        del self.driver.stored[data.draw(st.sampled_from(sorted(self.driver.stored)))]

    @rule(seconds=st.sampled_from([0.0, 0.6, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds
        self.driver.handle(Tick())

    @precondition(lambda self: self.driver.started)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(self.driver.started))
        self.ran.append(turn_id)
        self.driver.run(turn_id)

    @precondition(lambda self: self.driver.waiting)
    @rule(data=st.data())
    def client_hangs_up(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.driver.waiting)))
        del self.driver.waiting[turn_id]
        self.given_up.add(turn_id)
        if turn_id in self.driver.started:
            self.driver.started.remove(turn_id)
        self.driver.handle(TurnGone(turn_id))

    @rule(count=st.integers(1, 8))
    def pressure(self, count: int) -> None:
        rooms = self.driver.cache.occupancy
        wanted = min(count, rooms.evictable_blocks())
        if wanted:
            self.driver.cache.pressure.evict_blocks(wanted)

    @rule(blocks=st.integers(1, 16))
    def somebody_runs_on(self, blocks: int) -> None:
        """A turn that is not the node's holds blocks, as one does that was let on long ago. An
        engine lets no more on than it has state blocks: the next that starts has one."""
        cache, turn_id = self.driver.cache, TurnId(f"r{len(self.running)}-{self.driver.now}")
        if turn_id in self.running or cache.occupancy.states.free < 2:
            return
        turn = Turn(turn_id, None, pack(range(90_000, 90_000 + blocks * B)))
        if not isinstance(cache.begin(turn, self.driver.now), Begun):
            return
        if isinstance(cache.reserve(turn_id, blocks * B, self.driver.now), NoRoom):
            cache.abort(turn_id, self.driver.now)
        else:
            self.running.append(turn_id)

    @precondition(lambda self: self.running)
    @rule()
    def it_ends(self) -> None:
        self.driver.cache.abort(self.running.pop(), self.driver.now)

    @rule(low=st.sampled_from([0.0, 0.2, 0.6]), more=st.sampled_from([0.0, 0.3]))
    def watermarks_move(self, low: float, more: float) -> None:
        self.driver.watermarks(Watermarks(low=low, high=low + more, idle_s=0.4))

    @invariant()
    def holds(self) -> None:
        self.driver.check()
        reserved, _ = self.driver.cache.ingest.counts()
        here = len(self.driver.waiting) + len(("a", "b", "c"))  # and prefetches
        assert reserved <= 2 * here

    def teardown(self) -> None:
        """The store never answers again: deadlines alone must let every turn start."""
        while self.running:
            self.it_ends()
        for deadline_s in (SETTINGS.room_wait_s, SETTINGS.restore_deadline_s):
            self.driver.now += deadline_s
            self.driver.handle(Tick())
        assert set(self.driver.started) == set(self.driver.waiting)
        for turn_id in list(self.driver.started):
            self.run_one(turn_id)
        assert sorted({*self.ran, *self.given_up}) == sorted(
            f"t{n + 1}" for n in range(self.arrived)
        )
        assert len(self.ran) + len(self.given_up) == self.arrived
        while self.driver.writes:
            self.driver.write()
            self.driver.check()
        assert self.driver.cache.ingest.counts() == (0, 0)
        self.driver.watermarks(Watermarks(low=0.0, high=0.0))
        for _ in range(100):  # its silence was a failure: no spill stays open, nothing stays held
            while self.driver.pending:
                self.driver.fail(self.driver.pending.popleft())
            self.driver.handle(Tick())
        assert (
            not self.driver.cache.pressure.open_spills
            and not self.driver.state.pressure_relief.is_busy
        )
        held = snapshot(self.driver.cache, 0.0).pools
        assert not any(pool.protected for pool in held.values())

    def run_one(self, turn_id: TurnId) -> None:
        self.ran.append(turn_id)
        self.driver.run(turn_id)
        self.driver.check()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
