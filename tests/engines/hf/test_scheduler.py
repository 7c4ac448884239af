"""Scheduler scenarios over the real HeteroCache: what runs in which step. No torch."""

from __future__ import annotations

import pytest

from ownerserve.cache.effects import CopyState, LoadPoint, ResetState, SavePoint
from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Append, Arrival, Begun, Replay, SlotsReserved, Turn
from ownerserve.engines.hf.scheduling.requests import WorkerRefusal
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import (
    CheckpointsOf,
    Intake,
    QueuedPrompt,
    RequestArrival,
    RequestRejected,
    ResumeOf,
    SchedulerLimits,
    SchedulerLoad,
    StepPlan,
)
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.vocabulary.chains import prefix_of

BLOCK, CHUNK = 4, 8
LAYOUT = Layout(
    BLOCK,
    (Component("dense", Coverage.RANGE, 8, 8), Component("swa", Coverage.POINT, 8, 8)),
    state_bytes=8,
)


class Bench:
    """A scheduler with a cache, stepped by hand; every sampled token is 7."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        max_running: int = 8,
        max_waiting: int = 8,
        resume_of: ResumeOf | None = None,
        checkpoints_of: CheckpointsOf | None = None,
    ) -> None:
        self.cache = HeteroCache(LAYOUT, {"dense": blocks, "swa": 32}, max_running)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerLimits(
                chunk_tokens=CHUNK,
                prefill_tokens_a_step=CHUNK,
                max_running=max_running,
                max_waiting=max_waiting,
                sequence_tokens=blocks * BLOCK,
            ),
            resume_of=resume_of,
            checkpoints_of=checkpoints_of,
        )
        self.now = 0.0
        self.left: dict[TurnId, int] = {}
        self.effects: list[object] = []

    def arrive(
        self, name: str, prompt: list[int], *, new: int = 4, choices: int = 1, session: str = ""
    ) -> QueuedPrompt | RequestRejected:
        turn_ids = tuple(TurnId(f"{name}.{i}") for i in range(choices))
        self.left |= dict.fromkeys(turn_ids, new)
        return self.scheduler.arrive(
            RequestArrival(
                request_id=name,
                turn_ids=turn_ids,
                prompt=prefix_of(prompt, BLOCK),
                max_new_tokens=new,
                session_id=session or None,
            )
        )

    def arrive_for_another(self, name: str, whole: list[int]) -> None:
        """The whole blocks of a prompt that leave a token, which another worker answers."""
        beginning = whole[: (len(whole) - 1) // BLOCK * BLOCK]
        queued = self.scheduler.arrive(
            RequestArrival(
                request_id=name,
                turn_ids=(TurnId(f"{name}.0"),),
                prompt=prefix_of(beginning, BLOCK),
                max_new_tokens=0,
                begins=len(whole),
            )
        )
        assert isinstance(queued, QueuedPrompt)

    def step(self) -> StepPlan:
        self.now += 1
        plan = self.scheduler.plan(self.now)
        turns = [t for chunk in plan.chunks for t in chunk.sample_for]
        turns += [row.turn_id for row in plan.rows]
        for turn_id in turns:
            self.left[turn_id] -= 1
        ended = [turn_id for turn_id in turns if not self.left[turn_id]]
        after = self.scheduler.step_done(dict.fromkeys(turns, 7), ended, now=self.now)
        self.effects = [*plan.effects, *after]
        self.scheduler.check()
        return plan

    def drain(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert len(plans) < 500, "no progress"
        return plans


def spans(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.turn_id, c.start, c.start + len(c.tokens)) for c in plan.chunks]


def test_a_prompt_is_prefilled_on_the_grid_then_decoded() -> None:
    bench = Bench()
    bench.arrive("a", list(range(18)), new=3)
    work = [(spans(plan), [row.position for row in plan.rows]) for plan in bench.drain()]
    assert work == [
        ([("a.0", 0, 8)], []),
        ([("a.0", 8, 16)], []),
        ([("a.0", 16, 18)], []),
        ([], [18]),
        ([], [19]),
    ]


def test_a_prompt_for_another_is_computed_in_its_pieces_and_nothing_is_sampled() -> None:
    bench = Bench()
    bench.arrive_for_another("p", list(range(27)))
    plans = bench.drain()
    alone = Bench()
    alone.arrive("a", list(range(27)), new=1)
    assert [one[1:] for plan in plans for one in spans(plan)] == [(0, 8), (8, 16), (16, 24)]
    elsewhere = [one[1:] for plan in alone.drain() for one in spans(plan)]
    assert elsewhere == [(0, 8), (8, 16), (16, 24), (24, 27)]
    assert not any(chunk.sample_for for plan in plans for chunk in plan.chunks)
    assert [chunk.ends_turn for plan in plans for chunk in plan.chunks] == [False, False, True]
    assert any(isinstance(effect, SavePoint) for effect in bench.effects), "its point is kept"
    # Who answers goes on from there.
    bench.arrive("a", list(range(27)), new=1)
    assert spans(bench.step()) == [("a.0", 24, 27)]
    assert bench.scheduler.counts.done == 2 and not bench.cache.running


def test_snapshots_stand_where_the_next_turn_resumes() -> None:
    bench = Bench()
    bench.arrive("a", list(range(12)), new=6)
    saved = []
    while bench.scheduler.has_work:
        bench.step()
        position = parts_of(bench.cache).running["a.0"].position if bench.cache.running else None
        saved += [position for effect in bench.effects if isinstance(effect, SavePoint)]
    # 8 = (N-1)//B*B, 12 = N//B*B, 16 = the decode's; 20 would need one more token
    assert saved == [8, 12, 16]


def test_the_next_turn_of_a_session_computes_only_what_it_adds() -> None:
    bench = Bench()
    bench.arrive("a", list(range(18)), new=3, session="s")
    bench.drain()
    bench.arrive("b", [*range(18), 7, 7, 7, 50, 51], new=1, session="s")
    first = bench.step()
    # 20 tokens were computed (the last sampled one was not), 20 = 5 blocks are sealed
    assert [admission.restored for admission in first.admitted] == [20]
    assert spans(first) == [("b.0", 20, 23)]
    assert isinstance(first.effects[0], LoadPoint)


def test_decodes_run_beside_a_long_prefill() -> None:
    bench = Bench()
    bench.arrive("short", [1, 2, 3], new=10)
    bench.step()
    bench.arrive("long", list(range(100, 140)), new=1)
    for start in range(0, 32, CHUNK):
        plan = bench.step()
        assert [row.turn_id for row in plan.rows] == ["short.0"]
        assert spans(plan) == [("long.0", start, start + CHUNK)]


def test_several_short_prompts_share_a_step_within_the_budget() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.arrive(name, [ord(name)] * 3, new=2)
    assert spans(bench.step()) == [("a.0", 0, 3), ("b.0", 0, 3)]
    plan = bench.step()
    assert spans(plan) == [("c.0", 0, 3)]
    assert [row.turn_id for row in plan.rows] == ["a.0", "b.0"]


def test_the_youngest_is_preempted_and_comes_back_with_what_it_wrote() -> None:
    bench = Bench(blocks=8)
    bench.arrive("old", [1] * 9, new=16)
    bench.arrive("young", [2] * 9, new=12)
    plans = bench.drain()
    assert "young.0" in [turn for plan in plans for turn in plan.preempted]
    again = [a for plan in plans for a in plan.admitted if a.again]
    assert [a.turn_id for a in again] == ["young.0"]
    # it resumes where its last snapshot is, not from nothing
    assert again[0].restored >= 8
    counts = bench.scheduler.counts
    assert (counts.arrived, counts.done, counts.failed) == (2, 2, 0)
    positions = [row.position for plan in plans for row in plan.rows if row.turn_id == "young.0"]
    assert positions == sorted(set(positions)), "no position is decoded twice"


def test_a_prefill_preempted_midway_goes_on_from_there() -> None:
    bench = Bench(blocks=10)
    bench.arrive("old", [1] * 9, new=7)
    bench.arrive("young", [2] * 28, new=1)
    plans = bench.drain()
    assert ["young.0"] in [plan.preempted for plan in plans]
    [again] = [a for plan in plans for a in plan.admitted if a.again]
    assert again.restored == 24
    assert sum(len(c.tokens) for p in plans for c in p.chunks if c.turn_id == "young.0") == 28


def test_the_oldest_is_never_preempted() -> None:
    bench = Bench(blocks=10)
    for name in ("a", "b", "c", "d"):
        bench.arrive(name, [ord(name)] * 9, new=20)
    plans = bench.drain()
    preempted = [turn for plan in plans for turn in plan.preempted]
    assert preempted
    assert "a.0" not in preempted
    assert bench.scheduler.counts.done == 4


def test_a_request_that_can_never_fit_is_refused_with_its_reason() -> None:
    bench = Bench(blocks=4)
    answer = bench.arrive("big", [1] * 10, new=8)
    assert isinstance(answer, RequestRejected)
    assert answer.reason is WorkerRefusal.CONTEXT_LENGTH
    assert "16" in answer.message
    assert isinstance(bench.arrive("fits", [1] * 10, new=7), QueuedPrompt)
    bench.drain()
    bench.scheduler.check()


def test_a_full_queue_refuses() -> None:
    bench = Bench(max_waiting=1)
    bench.arrive("a", [1])
    answer = bench.arrive("b", [1])
    assert isinstance(answer, RequestRejected)
    assert answer.reason is WorkerRefusal.QUEUE_FULL


def test_choices_fork_from_one_prefill() -> None:
    bench = Bench()
    bench.arrive("a", [1] * 6, new=3, choices=3)
    first = bench.step()
    assert spans(first) == [("a.0", 0, 4)]
    second = bench.step()
    assert second.chunks[0].sample_for == ("a.0", "a.1", "a.2")
    assert sum(isinstance(effect, CopyState) for effect in bench.effects) == 2
    assert [row.turn_id for row in bench.step().rows] == ["a.0", "a.1", "a.2"]
    assert sum(plan.prefill_tokens for plan in bench.drain()) == 0


def test_choices_without_room_wait_and_reuse_the_prompt() -> None:
    bench = Bench(max_running=2)
    bench.arrive("a", [1] * 9, new=3, choices=4)
    plans = bench.drain()
    late = [a for plan in plans for a in plan.admitted if a.turn_id != "a.0"]
    assert [a.turn_id for a in late] == ["a.2", "a.3"]
    assert all(a.restored == 8 for a in late)
    assert bench.scheduler.counts.done == 1


def test_abort_frees_what_was_private_and_forgets_the_request() -> None:
    bench = Bench()
    free = bench.cache.occupancy.blocks.free
    bench.arrive("a", [1] * 20, choices=2)
    bench.arrive("queued", [2] * 20)
    bench.step()
    bench.scheduler.abort("a", bench.now)
    bench.scheduler.abort("queued", bench.now)
    bench.scheduler.abort("never heard of", bench.now)
    bench.scheduler.check()
    assert not bench.scheduler.has_work
    assert bench.cache.occupancy.blocks.free + bench.cache.occupancy.evictable_blocks() == free
    assert bench.scheduler.load() == SchedulerLoad(0, 0, 0)


def test_load_counts_what_is_queued_and_not_yet_computed() -> None:
    bench = Bench()
    bench.arrive("a", [1] * 20)
    bench.arrive("b", [2] * 5)
    assert bench.scheduler.load() == SchedulerLoad(2, 0, 25, queued_blocks=8)
    bench.step()
    assert bench.scheduler.load() == SchedulerLoad(1, 1, 17, growth_blocks=4, queued_blocks=2)


def test_a_fresh_sequence_starts_from_an_empty_state() -> None:
    bench = Bench()
    bench.arrive("a", [1])
    assert isinstance(bench.step().effects[0], ResetState)


def test_a_chunk_off_the_block_grid_is_refused() -> None:
    cache = HeteroCache(LAYOUT, {"dense": 8, "swa": 8}, 2)
    limits = SchedulerLimits(
        chunk_tokens=6,
        prefill_tokens_a_step=6,
        max_running=1,
        max_waiting=1,
        sequence_tokens=32,
    )
    with pytest.raises(InvalidInput) as refused:
        Scheduler(cache, limits)
    assert refused.value.field == "chunk"


# ---- with a node beside it


def test_a_held_turn_keeps_its_place_and_lets_others_pass() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.arrive(name, list(range(6)), new=1)
    bench.scheduler.hold(TurnId("a.0"))
    assert spans(bench.step()) == [("b.0", 0, 4)]
    bench.drain()
    assert not bench.scheduler.has_work, "a step would do nothing"
    bench.scheduler.release(TurnId("a.0"))
    assert [spans(plan) for plan in bench.drain()] == [[("a.0", 4, 6)]]


def test_a_turn_that_waits_for_its_state_takes_no_place_in_the_queue() -> None:
    bench = Bench(max_waiting=2)
    for number in range(2):
        assert isinstance(bench.arrive(f"held{number}", list(range(10))), QueuedPrompt)
        bench.scheduler.hold(TurnId(f"held{number}.0"))
    assert isinstance(bench.arrive("c", list(range(50, 60))), RequestRejected), "as many are held"
    bench.scheduler.release(TurnId("held1.0"))
    assert isinstance(bench.arrive("d", list(range(50, 60))), QueuedPrompt)
    assert bench.scheduler.load().waiting == 3, "all of them are told to routers"
    # Who was held has its place among arrivals still.
    bench.scheduler.release(TurnId("held0.0"))
    admitted = [one.request_id for plan in bench.drain() for one in plan.admitted]
    assert admitted == ["held0", "held1", "d"]


def test_no_room_beside_a_held_turn_is_no_failure() -> None:
    """What is missing may be reserved for the held one, and will be had when it is released."""
    bench = Bench(blocks=4)
    bench.arrive("held", [9] * 5, new=1)
    bench.scheduler.hold(TurnId("held.0"))
    bench.cache.begin(Turn(TurnId("x"), None, pack([1] * 12)), 0.0)
    bench.cache.reserve(TurnId("x"), 12, 0.0)
    bench.arrive("b", list(range(8)), new=1)
    assert not any(plan.failed for plan in bench.drain())
    assert bench.scheduler.load().waiting == 2, "it waits, and does not spin"
    bench.cache.abort(TurnId("x"), 0.0)
    bench.scheduler.release(TurnId("held.0"))
    assert not any(plan.failed for plan in bench.drain())


def test_no_room_beside_what_comes_is_no_failure() -> None:
    """Slots that are reserved for state which no turn here waits for can be had once it has come,
    or is given up."""
    bench = Bench(blocks=4)
    tokens = pack(range(50, 50 + 3 * BLOCK))
    arrival = Arrival(tokens, hash_prefix(tokens, BLOCK)[-1])
    comes = bench.cache.ingest.reserve(arrival, 0.0)
    assert isinstance(comes, SlotsReserved)
    bench.arrive("b", list(range(8)), new=1)
    assert not any(plan.failed for plan in bench.drain())
    assert bench.scheduler.load().waiting == 1, "it waits, and does not spin"
    bench.cache.ingest.abort(comes.ticket, 0.0)
    bench.cache.ingest.quiet(comes.ticket)
    bench.scheduler.room_returned()
    plans = bench.drain()
    assert [one.request_id for plan in plans for one in plan.admitted] == ["b"]


def test_a_replay_has_a_floor_and_no_snapshot_below_it() -> None:
    bench = Bench(resume_of=lambda _: Replay(8, 20))
    bench.cache.begin(Turn(TurnId("x"), None, pack(range(24))), 0.0)
    bench.cache.reserve(TurnId("x"), 24, 0.0)
    bench.cache.advance(TurnId("x"), pack(range(24)), 0.0)
    bench.cache.finish(TurnId("x"), 0.0)
    bench.arrive("a", [*range(22), 90, 91], new=1)
    saved, chunks = [], []
    while bench.scheduler.has_work:
        plan = bench.step()
        chunks += [(c.start, c.start + len(c.tokens), c.write_floor) for c in plan.chunks]
        position = chunks[-1][1]
        saved += [position for effect in bench.effects if isinstance(effect, SavePoint)]
    assert chunks == [(8, 16, 20), (16, 20, 20), (20, 24, 20)]
    assert saved == [20, 24]


def test_a_turn_preempted_in_mid_replay_leaves_no_snapshot() -> None:
    """Until the floor its windows are not right."""
    bench = Bench(blocks=12, resume_of=lambda tokens: Replay(0, 20) if len(tokens) > 80 else None)
    bench.cache.begin(Turn(TurnId("x"), None, pack(range(24))), 0.0)
    bench.cache.reserve(TurnId("x"), 24, 0.0)
    bench.cache.advance(TurnId("x"), pack(range(24)), 0.0)
    bench.cache.finish(TurnId("x"), 0.0)
    bench.arrive("old", [50] * 7, new=20)
    bench.step()
    bench.arrive("new", [*range(22), 90, 91], new=1)
    sequence = bench.scheduler._sequences[TurnId("new.0")]  # noqa: SLF001 - to throw it out
    while not sequence.computed:
        bench.step()
    assert 0 < sequence.computed < sequence.write_floor
    plan = StepPlan()
    bench.scheduler._preempt(sequence, plan, 0.0)  # noqa: SLF001 - now, not by pressure
    assert not plan.effects


def test_a_turn_aborted_in_mid_replay_leaves_its_session_where_it_was() -> None:
    """What the tree holds behind the abort is another's: no later turn of the session meets it."""
    replays: list[Replay] = []
    bench = Bench(resume_of=lambda _: replays.pop() if replays else None)
    bench.arrive("a", [*range(8), 60, 61], new=1, session="s")
    bench.arrive("other", list(range(24)), new=1)
    bench.drain()
    before = bench.cache.sessions.get(SessionId("s"))
    assert before is not None
    at = (before.version, before.tokens, before.depth, before.tail)
    replays.append(Replay(8, 20))
    bench.arrive("b", [*range(22), 90, 91], new=1, session="s")
    [admission] = bench.step().admitted
    assert (admission.restored, admission.floor) == (8, 20)
    bench.scheduler.abort("b", bench.now)
    assert (
        (before.version, before.tokens, before.depth, before.tail)
        == at
        == (1, 10, 2, pack([60, 61]))
    )
    append = Append(TurnId("c"), SessionId("s"), 1, pack([7, 50, 51]))
    begun = bench.cache.append(append, bench.now)
    assert isinstance(begun, Begun)
    assert begun.pending == pack([*range(8), 60, 61, 7, 50, 51])[begun.restored * 4 :]


def saved_at(bench: Bench) -> list[int]:
    """Positions at which prompt state is kept, until all is done."""
    saved = []
    while bench.scheduler.has_work:
        plan = bench.step()
        ends = [c.start + len(c.tokens) for c in plan.chunks]
        saved += [end for end in ends for e in bench.effects if isinstance(e, SavePoint)]
    return saved


def test_a_turn_at_risk_keeps_its_state_at_the_next_boundary_once() -> None:
    bench = Bench()
    bench.arrive("a", list(range(42)), new=1)
    bench.step()
    bench.scheduler.checkpoint([TurnId("a.0"), TurnId("gone.0")])
    assert saved_at(bench) == [16, 40], "the second chunk's end, then where the next turn resumes"


def test_a_waiting_turn_has_no_state_to_keep() -> None:
    bench = Bench()
    bench.arrive("a", list(range(42)), new=1)
    bench.scheduler.checkpoint([TurnId("a.0")])
    assert saved_at(bench) == [40]


def test_a_policys_checkpoints_are_kept_where_chunks_end() -> None:
    """At 12 no chunk ends: chunks are never cut for a checkpoint."""
    bench = Bench(checkpoints_of=lambda start, end: {12, 16, 32} if (start, end) == (0, 42) else ())
    bench.arrive("a", list(range(42)), new=1)
    assert saved_at(bench) == [16, 32, 40]


def intakes(bench: Bench) -> list[Intake]:
    """How the turns that are here are opened, until all is done."""
    return [admission.intake for plan in bench.drain() for admission in plan.admitted]


def test_a_prompt_that_goes_on_is_an_append_and_an_edited_one_a_begin() -> None:
    bench = Bench()
    prompt = list(range(18))
    bench.arrive("a", prompt, new=3, session="s")
    assert intakes(bench) == [Intake.BEGIN]
    prompt += [7, 7, 7, 50, 51]
    bench.arrive("b", prompt, new=3, session="s")
    assert intakes(bench) == [Intake.APPEND]
    bench.arrive("c", [*prompt, 7, 7, 7], new=2, session="s")  # the last was never computed
    assert intakes(bench) == [Intake.APPEND]
    bench.arrive("d", [*prompt, 7, 7, 9, 52], new=3, session="s")
    assert intakes(bench) == [Intake.BEGIN], "another token in the tail"
    bench.arrive("e", [99, *prompt, 7, 7, 9, 52, 7, 7], new=3, session="s")
    assert intakes(bench) == [Intake.BEGIN], "another token in the first block"
    bench.arrive("f", [99, *prompt, 7, 7, 9, 52, 7, 7, 7, 1], new=3, session="t")
    assert intakes(bench) == [Intake.BEGIN], "another session"
    session = bench.cache.sessions.get(SessionId("s"))
    assert session is not None and session.version == 5


def test_an_append_computes_what_a_begin_would() -> None:
    """Same restored tokens, same chunks, in a session and out of it."""
    spans_of = []
    for session in ("s", ""):
        bench = Bench()
        bench.arrive("a", list(range(18)), new=3, session=session)
        bench.drain()
        bench.arrive("b", [*range(18), 7, 7, *range(30, 50)], new=3, session=session)
        spans_of.append([spans(plan) for plan in bench.drain()])
    assert spans_of[0] == spans_of[1] and spans_of[0][0] == [("b.0", 20, 24)]


def test_a_session_of_which_something_went_begins() -> None:
    bench = Bench(blocks=16)
    bench.arrive("a", list(range(18)), new=3, session="s")
    bench.drain()
    bench.arrive("other", [90] * 50, new=3)
    bench.drain()
    bench.arrive("b", [*range(18), 7, 7, 50], new=3, session="s")
    assert intakes(bench) == [Intake.BEGIN]


def test_a_preempted_append_comes_back_as_one() -> None:
    bench = Bench(blocks=12)
    bench.arrive("a", list(range(10)), new=2, session="s")
    bench.drain()
    bench.arrive("old", [50] * 7, new=14)
    bench.step()
    bench.arrive("b", [*range(10), 7, 7, *range(60, 72)], new=12, session="s")
    plans = bench.drain()
    assert any("b.0" in plan.preempted for plan in plans)
    opened = [one for plan in plans for one in plan.admitted if one.turn_id == "b.0"]
    assert len(opened) > 1 and {one.intake for one in opened} == {Intake.APPEND}


def test_a_turn_that_is_stopped_amid_its_answer_goes_on_from_there() -> None:
    bench = Bench()
    bench.arrive("a", list(range(18)), new=8, session="s")
    turn = TurnId("a.0")
    assert not bench.scheduler.stop(turn, bench.now), "it has not begun"
    for _ in range(3):
        assert not bench.scheduler.stop(turn, bench.now), "nothing of its answer is written"
        bench.step()
    bench.step()
    assert bench.scheduler.stop(turn, bench.now)
    assert not bench.scheduler.stop(turn, bench.now), "it is"
    bench.scheduler.check()
    assert not bench.scheduler.has_work and not bench.cache.running
    assert bench.cache.residents.tokens_of(SessionId("s")), "others may read what it has sealed"
    bench.scheduler.release(turn)
    first = bench.step()
    # Two tokens were sampled, of which the first is computed: 19, of which 16 are sealed.
    assert [(one.restored, one.again) for one in first.admitted] == [(16, 1)]
    assert spans(first) == [("a.0", 16, 20)]
    bench.drain()
    assert bench.left[turn] == 0 and bench.scheduler.counts.done == 1


def test_a_stopped_turn_that_is_given_up_leaves_nothing() -> None:
    bench = Bench()
    bench.arrive("a", list(range(18)), new=8)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.stop(TurnId("a.0"), bench.now)
    bench.scheduler.abort("a", bench.now)
    bench.scheduler.check()
    bench.scheduler.release(TurnId("a.0"))  # whoever was slow to say so
    bench.scheduler.check()
    assert bench.scheduler.counts.done == 1 and not bench.scheduler.has_work
