"""What admission promises is kept, over the real cache and scheduler. A manual clock, no torch."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.engines.hf.engine.commands import TurnAdmission
from ownerserve.engines.hf.metrics.status import LoadShares, WorkerIdentity, worker_load
from ownerserve.engines.hf.scheduling.requests import EngineRequest, Stopping
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import (
    RequestArrival,
    RequestRejected,
    SchedulerLimits,
    StepPlan,
)
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import pack
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Release, Released, Reserve, Reserved, Seed
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import RESERVED_FOR_S
from ownerserve.node.vocabulary.chains import prefix_of

BLOCK = 16
STEP_S = 0.02
SCHEDULES = 30 if os.environ.get("OWNERSERVE_LONG") else 1
SCHEDULE_S = 60.0
LAYOUT = Layout(
    BLOCK,
    (Component("dense", Coverage.RANGE, 8, 8), Component("swa", Coverage.POINT, 8, 8)),
    state_bytes=8,
)


class Job(msgspec.Struct):
    """A turn that is here: what is left of its answer, and what it was promised."""

    request: EngineRequest
    left: int
    is_promised: bool
    arrived_step: int
    began_step: int = -1
    said: list[int] = []


class Bench:
    """A worker without a model: desk, scheduler and cache, stepped by hand."""

    def __init__(self, *, blocks: int = 64, max_running: int = 8) -> None:
        self.cache = HeteroCache(LAYOUT, {"dense": blocks, "swa": 32}, max_running)
        limits = SchedulerLimits(
            chunk_tokens=4 * BLOCK,
            prefill_tokens_a_step=4 * BLOCK,
            max_running=max_running,
            max_waiting=16,
            sequence_tokens=blocks * BLOCK,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.now = 0.0
        self.steps = 0
        self.turn_admission = TurnAdmission(
            self.cache, self.scheduler, self.load, now=lambda: self.now
        )
        self.jobs: dict[TurnId, Job] = {}
        self.preempted: list[TurnId] = []
        self.numbers = 0

    def load(self) -> WorkerLoad:
        load, shares = self.scheduler.load(), LoadShares((), 0.0)
        identity = WorkerIdentity("m", 1, 64)
        return worker_load(identity, self.cache, load=load, shares=shares, as_of_s=self.now)

    def ask(self, wanted: Seed) -> Reserved | Reject:
        self.numbers += 1
        answer = self.turn_admission.answer(Reserve(TurnId(f"ask{self.numbers}"), wanted))
        assert isinstance(answer, Reserved | Reject)
        return answer

    def come(
        self,
        prompt: list[int],
        *,
        new: int,
        session: str | None = None,
        place: Reserved | None = None,
        is_judged: bool = False,
    ) -> TurnId | RequestRejected:
        self.numbers += 1
        request = EngineRequest(
            request_id=f"r{self.numbers}",
            prompt=prompt,
            stopping=Stopping(max_tokens=new),
            session_id=session,
            reservation=None if place is None else place.reservation,
            is_judged=is_judged,
        )
        answer = self.turn_admission.let_in(request)
        if isinstance(answer, RequestRejected):
            return answer
        turn_id = TurnId(f"{request.request_id}.0")
        queued = self.scheduler.arrive(
            RequestArrival(
                request_id=request.request_id,
                turn_ids=(turn_id,),
                prompt=prefix_of(prompt, BLOCK),
                max_new_tokens=new,
                session_id=session,
                order=answer.order,
                is_promised=answer.is_promised,
            )
        )
        if isinstance(queued, RequestRejected):
            return queued
        self.jobs[turn_id] = Job(request, new, answer.is_promised, self.steps)
        return turn_id

    def step(self) -> StepPlan | None:
        self.now += STEP_S
        self.steps += 1
        if not self.scheduler.has_work:
            return None
        plan = self.scheduler.plan(self.now)
        for admission in plan.admitted:
            self.jobs[admission.turn_id].began_step = self.steps
        self.preempted += plan.preempted
        assert not plan.failed
        turns = [t for chunk in plan.chunks for t in chunk.sample_for]
        turns += [row.turn_id for row in plan.rows]
        for turn_id in turns:
            self.jobs[turn_id].left -= 1
            self.jobs[turn_id].said.append(7)
        ended = [turn_id for turn_id in turns if not self.jobs[turn_id].left]
        self.scheduler.step_done(dict.fromkeys(turns, 7), ended, now=self.now)
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.steps < 10_000, "no progress"


def text(tokens: int, seed: int) -> list[int]:
    return [seed * 10_000 + i for i in range(tokens)]


NO_ROOM = Reject(WorkerRefusal.NO_ROOM)


def test_room_is_promised_once() -> None:
    """Room 1,024: of five seeds of 900, one is reserved. All five were."""
    bench = Bench()
    answers = [bench.ask(Seed(900)) for _ in range(5)]
    assert isinstance(answers[0], Reserved)
    assert answers[1:] == [NO_ROOM] * 4
    assert isinstance(bench.ask(Seed(100)), Reserved)
    assert bench.turn_admission.answer(Release(answers[0].reservation)) == Released()
    assert isinstance(bench.ask(Seed(700, output_tokens=200)), Reserved)
    bench.now += RESERVED_FOR_S
    assert isinstance(bench.ask(Seed(1000)), Reserved), "places end with their deadline"


def test_a_lend_keeps_no_room_from_a_place() -> None:
    """It would be revoked for the turn: to refuse that one for it is to keep room from it."""
    bench = Bench()
    bench.come(text(900, 1), new=1, session="s")
    bench.run()
    lends = bench.cache.lends
    ticket = lends.lend([pack(text(896, 1))], bench.now, idle_s=1000.0)
    place = bench.ask(Seed(900))
    assert isinstance(place, Reserved) and lends.stands(ticket), "a promise takes no slot"
    assert bench.ask(Seed(900)) == NO_ROOM, "room is promised once"
    comes = bench.come(text(900, 2), new=1, place=place)
    assert isinstance(comes, str)
    bench.run()
    assert bench.jobs[comes].began_step > 0 and not lends.stands(ticket)


def test_running_and_queued_turns_count_with_their_whole_length() -> None:
    bench = Bench()
    bench.come(text(100, 1), new=500)
    assert bench.ask(Seed(500)) == NO_ROOM, "it waits, and will take 600"
    bench.step()
    assert bench.ask(Seed(500)) == NO_ROOM, "it runs, and will take 600"
    assert isinstance(bench.ask(Seed(400)), Reserved)


def test_a_turn_that_came_later_gives_way_to_a_place() -> None:
    bench = Bench()
    place = bench.ask(Seed(600, output_tokens=10))
    assert isinstance(place, Reserved)
    greedy = bench.come(text(300, 1), new=500)  # fits now, and grows into what is promised
    for _ in range(300):
        bench.step()
    late = bench.come(text(600, 2), new=10, place=place)
    assert isinstance(late, str)
    bench.step()
    assert bench.jobs[late].began_step > 0
    bench.run()
    assert set(bench.preempted) == {greedy}


def test_a_prompt_does_not_take_room_that_is_promised() -> None:
    bench = Bench()
    place = bench.ask(Seed(900))
    assert isinstance(place, Reserved)
    waiting = bench.come(text(300, 1), new=2)
    bench.step()
    assert bench.jobs[waiting].began_step < 0  # type: ignore[index]
    bench.now += RESERVED_FOR_S
    bench.turn_admission.standing()
    bench.step()
    assert bench.jobs[waiting].began_step > 0, "the place has ended"  # type: ignore[index]


def test_a_longer_turn_than_its_place_is_judged_anew() -> None:
    bench = Bench()
    one, two = bench.ask(Seed(400)), bench.ask(Seed(400))
    assert isinstance(one, Reserved) and isinstance(two, Reserved)
    assert isinstance(bench.come(text(420, 1), new=10, place=one), str)
    longer = bench.come(text(700, 2), new=10, place=two)
    assert isinstance(longer, RequestRejected)
    assert longer.reason is WorkerRefusal.NO_ROOM


def test_an_append_that_was_not_asked_for_is_judged_before_any_work() -> None:
    bench = Bench()
    assert isinstance(bench.come(text(900, 1), new=20, is_judged=True), str)
    for seed in (2, 3):  # these wait for the first one
        assert isinstance(bench.come(text(400, seed), new=20), str)
    refused = bench.come(text(600, 4), new=20, is_judged=True)
    assert isinstance(refused, RequestRejected)
    assert refused.reason is WorkerRefusal.NO_ROOM
    assert isinstance(bench.come(text(600, 4), new=20), str), "unjudged, it takes its chance"
    bench.run()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_reservations_are_each_kept(seed: int) -> None:
    """Sixty seconds of the worker's time: one schedule, with OWNERSERVE_LONG thirty."""
    dice = random.Random(seed)
    bench = Bench(blocks=96, max_running=6)
    open_places: list[tuple[float, Reserved, list[int], int, str | None]] = []
    history: dict[str, list[int]] = {}
    promised: dict[TurnId, Job] = {}
    kept = refused = 0
    while bench.now < SCHEDULE_S:
        kind = dice.random()
        if kind < 0.02:
            _plain(bench, dice, history)
        elif kind < 0.12:
            taken = {place[-1] for place in open_places}
            free = {name: told for name, told in history.items() if name not in taken}
            place = _reserve(bench, dice, free)
            refused += place is None
            if place is not None and dice.random() < 0.95:  # some never come
                open_places.append((bench.now + dice.uniform(0.0, 2.0), *place))
        due = [place for place in open_places if place[0] <= bench.now]
        open_places = [place for place in open_places if place[0] > bench.now]
        for _, place, prompt, new, session in due:
            came = bench.come(prompt, new=new, session=session, place=place)
            assert isinstance(came, str), came
            promised[came] = bench.jobs[came]
        bench.step()
        assert not set(bench.preempted) & set(promised), "a promised turn was preempted"
        for turn_id, job in bench.jobs.items():
            if not job.left and job.request.session_id:
                _told(bench, history, job)
            if turn_id in promised and not job.left:
                kept += 1
                del promised[turn_id]
        bench.jobs = {t: job for t, job in bench.jobs.items() if job.left}
    for _, place, prompt, new, session in open_places:
        assert isinstance(bench.come(prompt, new=new, session=session, place=place), str)
    bench.run()
    assert bench.turn_admission.admission.counts["revoked"] == 0
    assert kept > SCHEDULE_S / 6
    assert refused > 0, "there was no pressure"


def _told(bench: Bench, history: dict[str, list[int]], job: Job) -> None:
    session = bench.cache.sessions.get(SessionId(job.request.session_id or ""))
    if session is not None:
        history[job.request.session_id or ""] = [*job.request.prompt, *job.said]


def _plain(bench: Bench, dice: random.Random, history: dict[str, list[int]]) -> None:
    """A turn that nobody asked about: a new one, or a session's next."""
    session = dice.choice([None, "a", "b", "c", "d"])
    begins = history[session][:600] if session in history else text(dice.randrange(200), 1)
    prompt = [*begins, *text(dice.randrange(1, 400), dice.randrange(2, 1000))]
    bench.come(prompt, new=dice.randrange(1, 80), session=session)


def _reserve(
    bench: Bench, dice: random.Random, history: dict[str, list[int]]
) -> tuple[Reserved, list[int], int, str | None] | None:
    new = dice.randrange(1, 40)
    idle = [
        name
        for name in history
        if not any(job.request.session_id == name for job in bench.jobs.values())
    ]
    if idle and dice.random() < 0.5:
        session = dice.choice(idle)
        tokens = history[session]
        more = text(dice.randrange(1, 100), dice.randrange(2, 1000))
        prompt = [*tokens, *more]
        known = bench.cache.sessions.get(SessionId(session))
        if known is None or known.tokens + 1 != len(tokens) or len(prompt) + new > 90 * BLOCK:
            return None
        answer = bench.ask(Seed(len(prompt), output_tokens=new))
        return None if isinstance(answer, Reject) else (answer, prompt, new, session)
    prompt = [*text(dice.randrange(200), 1), *text(dice.randrange(1, 500), dice.randrange(2, 999))]
    answer = bench.ask(Seed(len(prompt), output_tokens=new))
    return None if isinstance(answer, Reject) else (answer, prompt, new, None)
