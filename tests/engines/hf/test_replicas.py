"""A hot prefix is copied, read-only, to one more worker before a fork asks for it there. Real
workers and a directory's service, in threads of one process; a gateway that decides it:
test_hot_prefixes.py; who dies or stands still amid it: test_replicas_cut_short.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory import messages as ask  # noqa: E402
from ownerserve.directory.rpc.client import DirectoryClient  # noqa: E402
from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import (  # noqa: E402
    AskSession,
    AskTokens,
    PrefixTaken,
    Reject,
    RpcAnswer,
    SessionTaken,
    Take,
    TakePrefix,
    TokensAre,
)
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from tests.support.hf.assumed import DEAR, pass_over  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import NAME, Fleet, asked, serve_at  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
PROMPT = text(300, seed=3)
SEALED = 288
"""The whole blocks of the parent's prompt and answer."""
FORK, OTHER = SessionId("e" * 32), SessionId("f" * 32)


@pytest.fixture(params=[2])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """So many workers that own and lend, the first of which has served a turn of the parent;
    computing is dear, so that what can be brought is."""
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (DEAR,))
    options = {"host_cache_bytes": 64 << 20, "transfer": TransferPlace()}
    one = Fleet(request.param, gateways=0, **options)
    leased = 'ownerserve_directory_answers_total{answer="leased"}'
    until(lambda: all(worker.metric(leased) for worker in one.workers))
    serve_at(one.workers[0], PROMPT)
    until(lambda: fleet_owns(one))
    yield one
    one.close()


def fleet_owns(fleet: Fleet) -> bool:
    return fleet.version(NAME) == 1


def address(worker: ServedWorker) -> LenderAddress:
    return LenderAddress(worker.unit, worker.rpc.address)


def copied(to: ServedWorker, source: ServedWorker, tokens: int = SEALED) -> RpcAnswer:
    return asked(to, TakePrefix(NAME, tokens, address(source)))


def told(worker: ServedWorker) -> list[int]:
    """How many tokens of the parent the worker says are on its device."""
    words = worker.http.get("/ownerserve/inventory").json()["words"]
    return [one["tokens"] for one in words if one["session"] == NAME and one["tier"] == "device"]


def count(worker: ServedWorker, end: str) -> float:
    return worker.metric(f'ownerserve_replicas_total{{end="{end}"}}')


def test_a_fork_where_its_prefix_was_copied_to_computes_its_tail_alone(fleet: Fleet) -> None:
    here, there = fleet.workers
    taken = copied(there, here)
    assert isinstance(taken, PrefixTaken) and taken.tokens == SEALED and taken.moved_bytes > 0
    assert (count(there, "taken"), there.metric("ownerserve_replica_bytes_total")) == (
        1, taken.moved_bytes,
    )  # fmt: skip
    fork = [*PROMPT[:SEALED], *text(40, seed=5)]
    said = serve_at(there, fork, name=FORK, parent=NAME)
    assert (said["cached"], said["mode"]) == (SEALED, "seed")
    assert there.metric('ownerserve_brought_total{end="brought"}') == 1, "nothing came with it"
    assert_cold(MODEL, fork, said)


def test_nobody_s_ownership_changes(fleet: Fleet) -> None:
    here, there = fleet.workers
    before = fleet.record(NAME)
    assert isinstance(copied(there, here), PrefixTaken)
    assert fleet.record(NAME) == before and fleet.owner(NAME) == here.unit
    assert there.metric("ownerserve_sessions_owned") == 0
    assert asked(there, AskSession(NAME)) == Reject(WorkerRefusal.UNKNOWN_SESSION)
    longer = [*PROMPT, *text(30, seed=8)]
    assert serve_at(here, longer)["cached"] >= SEALED, "its owner has it still"
    until(lambda: fleet.version(NAME) == 2)


def test_an_owner_has_what_a_guest_added_and_computes_it_no_more(fleet: Fleet) -> None:
    """Its own record stays as its turns left it: what came is cached state."""
    owner, guest = fleet.workers
    longer = [*PROMPT, *text(130, seed=8)]
    serve_at(guest, longer)
    rest = 416  # the whole blocks of the guest's prompt
    taken = copied(owner, guest, rest)
    assert isinstance(taken, PrefixTaken) and taken.tokens == rest and taken.moved_bytes > 0
    assert fleet.owner(NAME) == owner.unit and fleet.version(NAME) == 1
    further = [*longer[:rest], *text(40, seed=9)]
    said = serve_at(owner, further)
    assert said["cached"] == rest
    assert_cold(MODEL, further, said)


def test_it_is_told_as_resident_to_routers_and_to_the_directory(fleet: Fleet) -> None:
    here, there = fleet.workers
    assert isinstance(copied(there, here), PrefixTaken)
    assert told(there) == [SEALED]
    record = fleet.record(NAME)
    assert isinstance(record, ask.SessionIs) and record.prefix_hash is not None
    wanted = record.prefix_hash

    def copies() -> ask.Outcome:
        client = DirectoryClient(fleet.server.address)
        try:
            return client.execute([ask.Lookup((wanted,))])[0]
        finally:
            client.close()

    def is_read_only_there() -> bool:
        found = copies()
        return isinstance(found, ask.Found) and there.unit in [at[0] for at in found.locations]

    until(is_read_only_there)
    found = copies()
    assert isinstance(found, ask.Found) and found.owner != there.unit, "no last-copy duty"


def test_of_a_longer_session_only_what_was_asked_for_comes(fleet: Fleet) -> None:
    here, there = fleet.workers
    taken = copied(there, here, 130)
    assert isinstance(taken, PrefixTaken) and taken.tokens == 128 and told(there) == [128]
    again = copied(there, here)
    assert isinstance(again, PrefixTaken) and again.tokens == SEALED and told(there) == [SEALED]
    assert copied(there, here) == PrefixTaken(SEALED, 0), "it is here"


@pytest.mark.parametrize("fleet", [3], indirect=True)
def test_it_is_lent_on_by_the_parent_s_name(fleet: Fleet) -> None:
    here, there, last = fleet.workers
    assert isinstance(copied(there, here), PrefixTaken)
    assert isinstance(asked(there, AskTokens(NAME, SEALED)), TokensAre)
    assert isinstance(copied(last, there), PrefixTaken)
    fork = [*PROMPT[:SEALED], *text(40, seed=6)]
    said = serve_at(last, fork, name=FORK, parent=NAME)
    assert said["cached"] == SEALED
    assert_cold(MODEL, fork, said)


def test_it_goes_before_what_sessions_here_stand_on(fleet: Fleet) -> None:
    here, there = fleet.workers
    own = text(300, seed=21)
    serve_at(there, own, name=OTHER)
    assert isinstance(copied(there, here), PrefixTaken)
    number = 0
    while told(there) == [SEALED]:
        number += 1
        assert number < 200, "nothing presses"
        serve_at(there, text(300, seed=100 + number), name=None)
    longer = [*own, *text(30, seed=22)]
    assert serve_at(there, longer, name=OTHER)["cached"] >= SEALED


def test_a_session_of_which_there_is_a_replica_moves_there_too(fleet: Fleet) -> None:
    here, there = fleet.workers
    assert isinstance(copied(there, here), PrefixTaken)
    taken = asked(there, Take(NAME, address(here)))
    assert isinstance(taken, SessionTaken) and taken.tokens == SEALED
    assert fleet.owner(NAME) == there.unit
    assert copied(here, there) == PrefixTaken(SEALED, 0), "what its owner left is there"
    assert fleet.owner(NAME) == there.unit


def test_what_turns_left_here_stays_as_they_left_it(fleet: Fleet) -> None:
    """A worker that owns the session is told to copy its beginning from elsewhere."""
    here, there = fleet.workers
    assert isinstance(copied(there, here), PrefixTaken)
    assert isinstance(copied(here, there, 128), PrefixTaken)
    assert told(here) == [SEALED] and fleet.owner(NAME) == here.unit
    assert here.metric("ownerserve_sessions_owned") == 1


def test_what_nobody_has_or_cannot_be_had_is_refused(fleet: Fleet) -> None:
    here, there = fleet.workers
    assert copied(here, here) == Reject(WorkerRefusal.WRONG_TARGET)
    unknown = TakePrefix(FORK, SEALED, address(here))
    assert asked(there, unknown) == Reject(WorkerRefusal.UNKNOWN_SESSION)
    assert copied(there, here, 3) == Reject(WorkerRefusal.UNKNOWN_SESSION), "less than a block"
    nobody = LenderAddress(here.unit, "tcp://127.0.0.1:1")
    assert asked(there, TakePrefix(NAME, SEALED, nobody)) == Reject(WorkerRefusal.NO_ANSWER)
    assert told(there) == []
    assert count(there, "unknown_session") == 2 and count(there, "no_answer") == 1


def test_two_that_ask_at_once_move_the_bytes_once(fleet: Fleet) -> None:
    here, there = fleet.workers
    answers: list[RpcAnswer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(copied(there, here))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = [one.moved_bytes for one in answers if isinstance(one, PrefixTaken)]
    assert sum(one > 0 for one in moved) == 1
    others = [one for one in answers if not isinstance(one, PrefixTaken)]
    assert others in ([], [Reject(WorkerRefusal.SESSION_IS_MOVING)])
