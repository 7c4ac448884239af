"""Workers that own: two gateways, real workers and a directory service of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.directory import messages as ask
from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, encode_turn_line
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Released, ReleaseSession
from tests.support.hf.fleet_rig import ServedWorker
from tests.support.hf.owning_fleet import NAME, PROMPT, Fleet, asked, name_of, serve_at
from tests.support.waits import until

pytestmark = pytest.mark.engine


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    one = Fleet(2)
    yield one
    one.close()


@pytest.fixture
def three() -> Iterator[Fleet]:
    one = Fleet(3)
    yield one
    one.close()


def test_a_worker_binds_and_advances_the_session_that_it_serves(fleet: Fleet) -> None:
    first, second = fleet.gateways
    prompt = PROMPT
    where = ""
    for turn in range(1, 4):
        answer = first.complete(prompt, "s")
        assert answer.status_code == 200
        prompt = prompt + answer.json()["choices"][0]["token_ids"] + [11, 12, 13]
        where = answer.headers["x-ownerserve-worker"]
        name = name_of(first)
        until(lambda turn=turn, name=name: fleet.version(name) == turn)
    record = fleet.record(name_of(first))
    assert isinstance(record, ask.SessionIs)
    assert record.owner.worker and record.tokens >= len(PROMPT) // 16 * 16

    answer = second.complete(prompt, "s")  # a gateway that never met it
    assert answer.headers["x-ownerserve-worker"] == where
    assert answer.headers["x-ownerserve-mode"] == "direct_append"
    assert answer.headers["x-ownerserve-version"] == "3"
    until(lambda: fleet.version(name_of(second)) == 4)
    asked = fleet.directory.asked
    assert asked["Bind"] == 1 and asked["Advance"] <= 4 and "Transfer" not in asked


def test_the_end_of_a_session_reaches_the_directory(fleet: Fleet) -> None:
    gateway = fleet.gateways[0]
    assert gateway.complete(PROMPT, "s").status_code == 200
    name = name_of(gateway)
    until(lambda: fleet.version(name) == 1)
    body = {"prompt": [*PROMPT, 5], "max_tokens": 2, "temperature": 0}
    headers = {"x-session-id": "s", "x-ownerserve-session-final": "true"}
    assert gateway.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    until(lambda: isinstance(fleet.record(name), ask.Miss))


def test_a_worker_that_stops_gives_its_sessions_free_and_the_next_one_owns(fleet: Fleet) -> None:
    gateway = fleet.gateways[0]
    answer = gateway.complete(PROMPT, "s")
    name = name_of(gateway)
    until(lambda: fleet.version(name) == 1)
    here = answer.headers["x-ownerserve-worker"]
    leaving = next(one for one in fleet.workers if one.name == here)
    before = fleet.record(name)
    leaving.close()
    answer = gateway.complete([*PROMPT, 9], "s")
    assert answer.status_code == 200 and answer.headers["x-ownerserve-worker"] != here
    until(lambda: fleet.version(name) == 2)
    after = fleet.record(name)
    assert isinstance(before, ask.SessionIs) and isinstance(after, ask.SessionIs)
    assert after.epoch > before.epoch and after.owner != before.owner


@pytest.fixture
def alone() -> Iterator[ServedWorker]:
    """Nobody disturbs it: it computes each prompt from its beginning."""
    one = ServedWorker(WorkerOptions(model="tiny-qwen3", kv_bytes=8 << 20))
    yield one
    one.close()


def test_a_session_moves_over_three_workers_and_back(three: Fleet, alone: ServedWorker) -> None:
    """Each turn is done elsewhere, as a guest; then the owner releases. Its version never goes
    back, no answer is another than on a worker that nobody disturbs."""
    a, b, c = three.workers
    prompt, versions, epochs = PROMPT, [], []
    where = a
    serve_at(a, prompt)
    until(lambda: three.version(NAME) == 1)
    for target in (b, c, a, b, a):
        record = three.record(NAME)
        assert isinstance(record, ask.SessionIs) and record.owner == where.unit
        epochs.append(record.epoch)
        answer = serve_at(target, prompt, epoch=record.epoch)  # a guest's
        release = ReleaseSession(NAME, record.epoch, target.unit)
        assert asked(where, release) == Released()
        assert where.http.get("/ownerserve/cache").json()["sessions"] == 0  # nor a soft reference
        until(lambda target=target: three.owner(NAME) == target.unit)
        assert asked(where, release) == Reject(WorkerRefusal.STALE_EPOCH)
        prompt = prompt + answer["tokens"] + [11, 12, 13]
        before = three.version(NAME)
        answer = serve_at(target, prompt, epoch=record.epoch)  # the owner's
        until(lambda before=before: three.version(NAME) == before + 1)
        undisturbed = serve_at(alone, prompt, name=None)
        assert undisturbed["tokens"] == answer["tokens"]
        assert undisturbed["logprobs"] == pytest.approx(answer["logprobs"], abs=1e-4)
        versions.append(three.version(NAME))
        where = target
    assert versions == [2, 3, 4, 5, 6]
    assert sorted(set(epochs)) == epochs
    assert three.directory.asked["Transfer"] == 5
    stale = sum(
        one.metric('ownerserve_owner_refusals_total{reason="stale_epoch",verb="release"}')
        for one in three.workers
    )
    assert stale == 5


def test_a_session_whose_turn_is_there_is_not_released(fleet: Fleet) -> None:
    """Nor by who knows it under a former epoch."""
    here, there = fleet.workers
    serve_at(here, PROMPT)
    until(lambda: fleet.version(NAME) == 1)
    record = fleet.record(NAME)
    assert isinstance(record, ask.SessionIs)
    told = encode_turn_line(TurnLine(name=NAME, target=here.unit)).decode()
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    release = ReleaseSession(NAME, record.epoch, there.unit)
    with here.http.stream(
        "POST", "/v1/completions", json=body, headers={TURN_HEADER: told}
    ) as turn:
        assert turn.status_code == 200, turn.read()
        chunks = turn.iter_bytes()
        next(chunks)
        assert asked(here, release) == Reject(WorkerRefusal.SESSION_IS_RUNNING)
    until(lambda: asked(here, release) == Released())
    assert asked(there, ReleaseSession(NAME, record.epoch, here.unit)) == Reject(
        WorkerRefusal.NOT_OWNER
    )


def test_a_session_of_one_turn_ends_though_it_was_asked_for_only_then(fleet: Fleet) -> None:
    """Its turn is over before the directory has said whose it is."""
    here = fleet.workers[0]
    fleet.directory.slow_s = 0.5
    serve_at(here, PROMPT, final=True)
    until(lambda: here.metric('ownerserve_directory_answers_total{answer="ended"}') == 1)
    assert isinstance(fleet.record(NAME), ask.Miss)
    assert here.metric("ownerserve_sessions_owned") == 0


def test_a_guests_last_turn_ends_nothing_but_what_it_has_itself(fleet: Fleet) -> None:
    """The owner's record stays until it ends there, or is swept when it was idle for a day."""
    here, there = fleet.workers
    serve_at(here, PROMPT)
    until(lambda: fleet.version(NAME) == 1)
    serve_at(there, PROMPT, final=True)
    until(lambda: there.metric('ownerserve_directory_answers_total{answer="heldby"}') == 1)
    assert fleet.owner(NAME) == here.unit
    words = there.http.get("/ownerserve/inventory").json()["words"]
    assert not [one for one in words if one["session"] == NAME and one["is"] == "has"]


def test_an_owner_hears_of_a_later_one_by_a_turns_line(fleet: Fleet) -> None:
    """The turn is served all the same; what it owned is void, and it asks anew."""
    here, there = fleet.workers
    serve_at(here, PROMPT)
    until(lambda: fleet.version(NAME) == 1)
    other = SessionId("e" * 32)
    serve_at(there, PROMPT, name=other)
    until(lambda: fleet.version(other) == 1)
    before, later = fleet.record(NAME), fleet.record(other)
    assert isinstance(before, ask.SessionIs) and isinstance(later, ask.SessionIs)
    serve_at(here, PROMPT, epoch=later.epoch)  # some epoch that was granted after its own
    void = 'ownerserve_owner_refusals_total{reason="stale_epoch",verb="grant"}'
    until(lambda: here.metric(void) == 1)
    until(lambda: fleet.version(NAME) == 2)
    after = fleet.record(NAME)
    assert isinstance(after, ask.SessionIs) and after.epoch > later.epoch > before.epoch


def test_who_had_the_turn_learns_by_itself_that_the_session_is_its_own(fleet: Fleet) -> None:
    """The directory tells nobody of what it is given, and no other turn comes."""
    here, there = fleet.workers
    serve_at(here, PROMPT)
    until(lambda: fleet.version(NAME) == 1)
    record = fleet.record(NAME)
    assert isinstance(record, ask.SessionIs)
    serve_at(there, PROMPT, epoch=record.epoch)
    assert asked(here, ReleaseSession(NAME, record.epoch, there.unit)) == Released()
    until(lambda: there.metric("ownerserve_sessions_owned") == 1)
    assert (fleet.owner(NAME), fleet.version(NAME)) == (there.unit, 1)
