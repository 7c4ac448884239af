"""A Hypothesis machine over the scheduler with the smallest cache it can stand on.

Whatever arrives, is aborted, ends or finds no room: every request ends, its tokens are computed
once in order on the right positions, and the pools come back whole.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.cache.effects import Effect, LoadPoint, ResetState, SavePoint
from ownerserve.cache.layout import Component, Layout, Table
from ownerserve.cache.outcomes import Begun, CacheRefusal, CacheRefused, NoRoom, Turn
from ownerserve.cache.sessions import DigestAt
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import (
    RequestArrival,
    RequestRejected,
    SchedulerLimits,
    StepPlan,
)
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.kv.specs import Coverage
from ownerserve.node.vocabulary.chains import prefix_of

BLOCK = 4
CAPACITY_BLOCKS = 12
LIMITS = SchedulerLimits(
    chunk_tokens=8,
    prefill_tokens_a_step=12,
    max_running=4,
    max_waiting=6,
    sequence_tokens=CAPACITY_BLOCKS * BLOCK,
)


class Held:
    """One running turn."""

    def __init__(self, tokens: bytes, *, computed: bytes, state: int) -> None:
        self.tokens = tokens
        self.computed = computed
        self.state = state
        self.blocks = len(computed) // TOKEN_BYTES // BLOCK


class NoSessions:
    """Nothing is kept between turns, so that none is an append."""

    def append_of(self, turn: Turn, digest_at: DigestAt) -> None:
        return None


class FakeCache:
    """`capacity` blocks for running turns; snapshots are kept for ever and cost nothing.

    Not a model of HeteroCache's policy: the least that the scheduler relies on, and strict about
    the order of calls.
    """

    def __init__(self, capacity: int, state_slots: int = 64) -> None:
        self.layout = Layout(
            BLOCK,
            (Component("dense", Coverage.RANGE, 1, 1), Component("swa", Coverage.POINT, 1, 1)),
        )
        self.capacity = capacity
        self.sessions = NoSessions()
        self.turns: dict[TurnId, Held] = {}
        self.points: set[bytes] = set()
        self.finished: list[TurnId] = []
        self._states = set(range(state_slots))

    @property
    def used(self) -> int:
        return sum(held.blocks for held in self.turns.values())

    def begin(self, turn: Turn, now: float) -> Begun | CacheRefused:
        assert turn.turn_id not in self.turns, "begun twice"
        total = len(turn.tokens) // TOKEN_BYTES
        prefixes = (
            turn.tokens[: depth * TOKEN_BYTES]
            for depth in range((total - 1) // BLOCK * BLOCK, 0, -BLOCK)
        )
        found = next((prefix for prefix in prefixes if prefix in self.points), b"")
        restored = len(found) // TOKEN_BYTES
        if not self._states or self.used + restored // BLOCK > self.capacity:
            return CacheRefused(CacheRefusal.NO_STATE_BLOCK)
        state = self._states.pop()
        self.turns[turn.turn_id] = Held(turn.tokens, computed=found, state=state)
        effect: Effect = LoadPoint({"swa": 0}, state) if restored else ResetState(state)
        return Begun(restored, (effect,), restored, turn.tokens[len(found) :])

    def reserve(self, turn_id: TurnId, upto: int, now: float) -> tuple[Effect, ...] | NoRoom:
        held = self.turns[turn_id]
        more = max(0, -(-upto // BLOCK) - held.blocks)
        if self.used + more > self.capacity:
            return NoRoom("dense", self.used + more - self.capacity)
        held.blocks += more
        return ()

    def advance(self, turn_id: TurnId, tokens: Packed, now: float) -> None:
        held = self.turns[turn_id]
        held.computed += tokens
        assert len(held.computed) <= held.blocks * BLOCK * TOKEN_BYTES, "computed beyond its slots"
        prompt = min(len(held.tokens), len(held.computed))
        assert held.computed[:prompt] == held.tokens[:prompt], "not this turn's tokens"

    def snapshot(self, turn_id: TurnId, now: float) -> tuple[Effect, ...]:
        held = self.turns[turn_id]
        assert len(held.computed) % (BLOCK * TOKEN_BYTES) == 0, "snapshot off a boundary"
        self.points.add(held.computed)
        return (SavePoint(held.state, {"swa": 0}),)

    def fork(self, turn_id: TurnId, child_id: TurnId, now: float) -> tuple[Effect, ...] | NoRoom:
        held = self.turns[turn_id]
        if self.used + held.blocks > self.capacity or not self._states:
            return NoRoom("dense", 1)
        child = Held(held.tokens, computed=held.computed, state=self._states.pop())
        child.blocks = held.blocks
        self.turns[child_id] = child
        return ()

    def finish(self, turn_id: TurnId, now: float, *, tip: PrefixHash | None) -> None:
        self.abort(turn_id, now)
        self.finished.append(turn_id)

    def abort(self, turn_id: TurnId, now: float) -> None:
        self._states.add(self.turns.pop(turn_id).state)

    def table(self, turn_id: TurnId) -> Table:
        held = self.turns[turn_id]
        return Table({"dense": list(range(held.blocks))}, held.state)

    def check(self) -> None:
        assert self.used <= self.capacity


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: token t of a choice is `1000 + t`, lengths are drawn at arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = FakeCache(CAPACITY_BLOCKS)
        self.scheduler = Scheduler(self.cache, LIMITS)
        self.now = 0.0
        self.arrived = 0
        self.wanted: dict[TurnId, int] = {}
        self.output: dict[TurnId, list[int]] = {}
        self.prompts: dict[TurnId, list[int]] = {}
        self.whole: dict[TurnId, int] = {}
        self.gone: set[str] = set()
        self.held: set[TurnId] = set()
        self.seen: set[TurnId] = set()

    @rule(
        shared=st.integers(0, 20),
        own=st.integers(1, 24),
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    )
    def arrive(self, shared: int, own: int, lengths: list[int]) -> None:
        self.arrived += 1
        request_id = f"r{self.arrived}"
        prompt = [*range(shared), *[100 + self.arrived] * own]
        turn_ids = tuple(TurnId(f"{request_id}.{i}") for i in range(len(lengths)))
        arrival = RequestArrival(
            request_id=request_id,
            turn_ids=turn_ids,
            prompt=prefix_of(prompt, BLOCK),
            max_new_tokens=max(lengths),
        )
        if isinstance(self.scheduler.arrive(arrival), RequestRejected):
            return
        for turn_id, length in zip(turn_ids, lengths, strict=True):
            self.wanted[turn_id], self.output[turn_id] = length, []
            self.prompts[turn_id] = prompt

    @rule(shared=st.integers(0, 20), own=st.integers(1, 24))
    def arrive_for_another(self, shared: int, own: int) -> None:
        """The beginning of a prompt, up to where it leaves a token; nothing is sampled."""
        whole = [*range(shared), *[100 + self.arrived] * own]
        prompt = whole[: (len(whole) - 1) // BLOCK * BLOCK]
        if not prompt:
            return
        self.arrived += 1
        turn_id = TurnId(f"r{self.arrived}.0")
        arrival = RequestArrival(
            request_id=f"r{self.arrived}",
            turn_ids=(turn_id,),
            prompt=prefix_of(prompt, BLOCK),
            max_new_tokens=0,
            begins=len(whole),
        )
        if isinstance(self.scheduler.arrive(arrival), RequestRejected):
            return
        self.wanted[turn_id], self.output[turn_id] = 0, []
        self.prompts[turn_id], self.whole[turn_id] = prompt, len(whole)

    def just_queued(self) -> list[TurnId]:
        """Prompts of which nothing is computed, the last that came."""
        last = TurnId(f"r{self.arrived}.0")
        return [last] if last in self.wanted and last not in self.seen | self.held else []

    @precondition(lambda self: self.just_queued())
    @rule()
    def hold(self) -> None:
        """State is brought for it: it is out of the queue, whatever is planned."""
        (turn_id,) = self.just_queued()
        self.held.add(turn_id)
        self.scheduler.hold(turn_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(turn_id)
        self.scheduler.release(turn_id)
        self.scheduler.release(turn_id)  # as for one that was aborted: no error

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.wanted)))
        request_id = turn_id.split(".")[0]
        self.gone.add(request_id)
        self.held = {t for t in self.held if t.split(".")[0] != request_id}
        self.scheduler.abort(request_id, self.now)
        self.wanted = {t: n for t, n in self.wanted.items() if t.split(".")[0] != request_id}

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def step(self) -> None:
        self.now += 1
        plan = self.scheduler.plan(self.now)
        assert not plan.failed, "every accepted request fits when it is alone"
        assert plan.chunks or plan.rows or plan.preempted, "a step without progress"
        assert plan.prefill_tokens <= LIMITS.prefill_tokens_a_step
        self.check_work(plan)
        tokens: dict[TurnId, int] = {}
        for turn_id in (
            *(t for chunk in plan.chunks for t in chunk.sample_for),
            *(row.turn_id for row in plan.rows),
        ):
            assert turn_id not in tokens, "sampled twice in one step"
            tokens[turn_id] = 1000 + len(self.output[turn_id])
            self.output[turn_id].append(tokens[turn_id])
        ended = {t for t in tokens if len(self.output[t]) == self.wanted[t]}
        self.scheduler.step_done(tokens, ended, now=self.now)
        over = {chunk.turn_id for chunk in plan.chunks if chunk.ends_turn}
        assert over <= set(self.whole), "a turn that samples is over when its answer is"
        for turn_id in ended | over:
            del self.wanted[turn_id]

    def check_work(self, plan: StepPlan) -> None:
        """Every token is computed at its place, in slots that are the turn's."""
        self.seen |= {one.turn_id for one in plan.admitted}
        for chunk in plan.chunks:
            assert chunk.turn_id not in self.held
            known = self.prompts[chunk.turn_id] + self.output[chunk.turn_id]
            end = chunk.start + len(chunk.tokens)
            assert list(chunk.tokens) == known[chunk.start : end]
            assert len(chunk.table.range["dense"]) * BLOCK >= end
            whole = self.whole.get(chunk.turn_id)
            assert (end == len(known)) == bool(chunk.sample_for or chunk.ends_turn)
            assert (whole is None) == bool(chunk.sample_for) or end < len(known)
            last = ((whole or len(known)) - 1) // BLOCK * BLOCK
            assert end % LIMITS.chunk_tokens == 0 or end >= last
        for row in plan.rows:
            known = self.prompts[row.turn_id] + self.output[row.turn_id]
            assert (row.position, row.token) == (len(known) - 1, known[-1])

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()

    def teardown(self) -> None:
        for turn_id in sorted(self.held):
            self.scheduler.release(turn_id)
        self.held.clear()
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.wanted, "a request never ended"
        counts = self.scheduler.counts
        assert counts.arrived == counts.done + counts.rejected
        assert not self.cache.turns
        assert self.cache.used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
