"""Workers that own: two gateways, real workers and a directory service of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fleet_rig import ServedGateway, ServedWorker, until

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Answer, Reject, Released, ReleaseSession, Request
from ownerserve.kv.wire.turn_line import HEADER, TurnLine, encode
from ownerserve.node.ownership.ownership import boot_time_s
from ownerserve.node.rpc.server import RpcClient

pytestmark = pytest.mark.engine

PROMPT = [7 + n % 200 for n in range(96)]
NAME = SessionId("d" * 32)


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Counted(EmbeddedDirectory):
    """A directory that counts what it is asked, by type."""

    def __init__(self) -> None:
        super().__init__(BootClock(), TermFile(), lease_s=5.0, opens_in_s=0.0)
        self.asked: dict[str, int] = {}
        self.slow_s = 0.0

    def execute(self, requests):  # type: ignore[no-untyped-def]
        time.sleep(self.slow_s)
        for one in requests:
            name = type(one).__name__
            self.asked[name] = self.asked.get(name, 0) + 1
        return super().execute(requests)


class Fleet:
    """One directory, `workers` workers, two gateways."""

    def __init__(self, workers: int) -> None:
        self.directory = Counted()
        self.server = DirectoryServer(self.directory)
        self.server.start()
        address = self.server.address
        self.workers = [
            ServedWorker(
                WorkerOptions(
                    model="tiny-qwen3", kv_bytes=8 << 20, directory=address, worker_id=f"w{n}"
                )
            )
            for n in range(workers)
        ]
        self.gateways = [
            ServedGateway(*self.workers, directory=address, policy="ownerserve") for _ in range(2)
        ]

    def record(self, session: str) -> ask.SessionIs | ask.Miss:
        client = DirectoryClient(self.server.address)
        try:
            (found,) = client.execute([ask.FindSession(SessionId(session))])
        finally:
            client.close()
        assert isinstance(found, ask.SessionIs | ask.Miss)
        return found

    def owner(self, session: str) -> RoutingUnit | None:
        found = self.record(session)
        return found.owner if isinstance(found, ask.SessionIs) else None

    def version(self, session: str) -> int:
        found = self.record(session)
        return found.version if isinstance(found, ask.SessionIs) else -1

    def close(self) -> None:
        for one in (*self.gateways, *self.workers):
            one.close()
        self.server.stop()


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


def serve_at(
    worker: ServedWorker,
    prompt: list[int],
    *,
    name: SessionId | None = NAME,
    **line: Any,
) -> dict[str, Any]:
    """A turn that a gateway sends to this worker, whoever owns its session."""
    told = encode(TurnLine(name=name, target=worker.unit, **line)).decode()
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True}
    answer = worker.http.post("/v1/completions", json=body, headers={HEADER: told})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def asked(worker: ServedWorker, request: Request) -> Answer:
    client = RpcClient(worker.rpc.address)
    try:
        return client.ask(request)
    finally:
        client.close()


def name_of(gateway: ServedGateway, index: int = 0) -> str:
    """The gateway's name of the session that it met as `index`th."""
    return gateway.read(lambda: [str(name) for name, _ in gateway.gateway.state.sessions.items()])[
        index
    ]


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
    told = encode(TurnLine(name=NAME, target=here.unit)).decode()
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    release = ReleaseSession(NAME, record.epoch, there.unit)
    with here.http.stream("POST", "/v1/completions", json=body, headers={HEADER: told}) as turn:
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
