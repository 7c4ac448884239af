"""An idle session moves from one worker that owns to another: its state first, ownership after.
Real workers and a directory's service, in threads of one process; processes that are frozen and
killed: test_moves_cut_short.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory import messages as ask  # noqa: E402
from ownerserve.kv.ids import Incarnation, WorkerId  # noqa: E402
from ownerserve.kv.messages import Epoch, RoutingUnit  # noqa: E402
from ownerserve.kv.wire.framed import FramedClient  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import (  # noqa: E402
    AskSession,
    HandOver,
    Moved,
    Nonce,
    Reject,
    Released,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    Said,
    SessionStands,
    SessionTaken,
    Take,
    decode_answer,
    encode,
)
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from ownerserve.node.transfers.target_side import TargetSide  # noqa: E402
from tests.support.hf.assumed import DEAR, pass_over  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S, ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import NAME, Fleet, asked, serve_at  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

PROMPT = text(300, seed=3)
MODEL = "tiny-qwen3"
SEALED = 288
"""The whole blocks of a first turn's prompt and answer."""


@pytest.fixture(params=[0])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Two workers that own and lend, and so many gateways; computing is dear, so that what can be
    brought is."""
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (DEAR,))
    one = Fleet(2, gateways=request.param, host_cache_bytes=64 << 20, transfer=TransferPlace())
    leased = 'ownerserve_directory_answers_total{answer="leased"}'
    until(lambda: all(worker.metric(leased) for worker in one.workers))
    yield one
    one.close()


def address(worker: ServedWorker) -> LenderAddress:
    return LenderAddress(worker.unit, worker.rpc.address)


def moved(worker: ServedWorker, way: str, end: str) -> float:
    return worker.metric(f'ownerserve_session_moves_total{{end="{end}",way="{way}"}}')


def record(fleet: Fleet) -> ask.SessionIs:
    found = fleet.record(NAME)
    assert isinstance(found, ask.SessionIs)
    return found


class Tapped:
    """What a worker asks its peers by, where something happens before a question is asked."""

    def __init__(self, worker: ServedWorker, what: type, then: Callable[[], object]) -> None:
        assert worker.worker.transfers is not None
        self._peer = worker.worker.transfers.service.target
        self._what, self._then = what, then
        self.asked: list[RpcRequest] = []
        self.said: list[Said | None] = []

    async def ask(self, peer: LenderAddress, request: RpcRequest, **how: Any) -> Said | None:
        if isinstance(request, self._what):
            await asyncio.to_thread(self._then)
        self.asked.append(request)
        self.said.append(await self._peer.ask(peer, request, **how))
        return self.said[-1]


def take_past(worker: ServedWorker, source: ServedWorker, tapped: Tapped) -> RpcAnswer:
    """What the worker answers to a Take, whose questions to its peer go past the tap."""
    transfers = worker.worker.transfers
    assert transfers is not None and transfers.takes is not None
    taking = transfers.takes.take(Take(NAME, address(source)), tapped)
    return transfers.service.run(taking).result(WAIT_S)


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_a_drained_worker_is_left_by_sessions_of_which_no_turn_comes(fleet: Fleet) -> None:
    (gateway,) = fleet.gateways
    contexts: dict[str, list[int]] = {}
    homes: dict[str, str] = {}
    for number in range(4):
        name = f"agent{number}"
        prompt = text(200, seed=number)
        answer = gateway.complete(prompt, name)
        contexts[name] = [*prompt, *answer.json()["choices"][0]["token_ids"], *text(20, seed=9)]
        homes[name] = answer.headers["x-ownerserve-worker"]
    here = next(worker for worker in fleet.workers if worker.name == homes["agent0"])
    (there,) = [worker for worker in fleet.workers if worker is not here]
    until(lambda: sum(one.metric("ownerserve_sessions_owned") for one in fleet.workers) == 4)
    gateway.read(lambda: gateway.gateway.roster.drain(WorkerId(here.name)))
    until(lambda: there.metric("ownerserve_sessions_owned") == 4)
    until(lambda: here.http.get("/ownerserve/cache").json()["sessions"] == 0)
    left = sum(home == here.name for home in homes.values())
    until(lambda: gateway.metric("ownerserve_gateway_moves_total", end="taken") == left)
    for name, prompt in contexts.items():
        answer = gateway.complete(prompt, name)
        assert answer.headers["x-ownerserve-worker"] == there.name, name
        assert int(answer.headers["x-ownerserve-cached-tokens"]) >= 192
        assert answer.headers["x-ownerserve-mode"] == "direct_append"


def first_turn(fleet: Fleet) -> list[int]:
    """A turn at the first worker, which owns its session from then on; what a next one begins
    with."""
    said = serve_at(fleet.workers[0], PROMPT)
    until(lambda: fleet.version(NAME) == 1)
    return [*PROMPT, *said["tokens"], *text(20, seed=9)]


def test_its_next_turn_is_an_append_where_it_went(fleet: Fleet) -> None:
    here, there = fleet.workers
    longer = first_turn(fleet)
    before = record(fleet)
    taken = asked(there, Take(NAME, address(here)))
    assert isinstance(taken, SessionTaken) and taken.version == 1
    assert taken.tokens == SEALED
    assert there.metric('ownerserve_brought_total{end="brought"}') == 1
    after = record(fleet)
    assert (after.owner, after.version, after.epoch) == (there.unit, 1, taken.epoch)
    assert after.epoch > before.epoch
    until(lambda: there.metric("ownerserve_sessions_owned") == 1)
    until(lambda: here.http.get("/ownerserve/cache").json()["sessions"] == 0)
    assert moved(there, "came", "taken") == moved(here, "went", "moved") == 1
    assert there.metric("ownerserve_session_handover_seconds_total") > 0
    assert here.metric("ownerserve_session_handover_seconds_total") == 0
    words = there.http.get("/ownerserve/inventory").json()["words"]
    here_now = [one for one in words if one["session"] == NAME and one["tier"] == "device"]
    assert [one["tokens"] for one in here_now] == [taken.tokens]  # on a busy machine, below it too

    answer = serve_at(there, longer, epoch=after.epoch)
    assert answer["mode"] == "direct_append" and answer["cached"] == taken.tokens
    assert_cold(MODEL, longer, answer)
    until(lambda: fleet.version(NAME) == 2)
    assert record(fleet).owner == there.unit


def test_it_comes_back_with_all_that_its_owners_left(fleet: Fleet) -> None:
    """Its open tokens too, which stand behind the last whole block."""
    here, there = fleet.workers
    longer = first_turn(fleet)
    assert isinstance(asked(there, Take(NAME, address(here))), SessionTaken)
    until(lambda: there.metric("ownerserve_sessions_owned") == 1)
    tapped = Tapped(here, HandOver, lambda: None)
    back = take_past(here, there, tapped)
    assert isinstance(back, SessionTaken) and (back.version, back.tokens) == (1, SEALED)
    moved_back = tapped.said[-1]
    assert isinstance(moved_back, Moved) and len(moved_back.open_tokens) == 4 * (303 - SEALED)
    until(lambda: here.metric("ownerserve_sessions_owned") == 1)
    answer = serve_at(here, longer)
    assert (answer["mode"], answer["cached"]) == ("direct_append", SEALED)
    assert_cold(MODEL, longer, answer)
    until(lambda: fleet.version(NAME) == 2)


def test_what_a_turn_added_meanwhile_is_brought_too(fleet: Fleet) -> None:
    here, there = fleet.workers
    longer = first_turn(fleet)
    turns = iter([longer])

    def turn() -> None:
        if (prompt := next(turns, None)) is not None:
            longer.extend(serve_at(here, prompt)["tokens"])

    tapped = Tapped(there, HandOver, turn)
    taken = take_past(there, here, tapped)
    assert isinstance(taken, SessionTaken) and taken.version == 2
    assert [type(one) for one in tapped.asked] == [AskSession, HandOver] * 2
    assert moved(here, "went", "stale_version") + moved(here, "went", "session_is_running") == 1
    answer = serve_at(there, [*longer, *text(20, seed=11)])
    assert answer["cached"] == taken.tokens > SEALED
    assert_cold(MODEL, [*longer, *text(20, seed=11)], answer)


def test_a_session_that_goes_on_stays_where_it_is(fleet: Fleet) -> None:
    here, there = fleet.workers
    longer = first_turn(fleet)

    def turn() -> None:
        longer.extend([*serve_at(here, longer)["tokens"], *text(20, seed=len(longer))])

    refused = take_past(there, here, Tapped(there, HandOver, turn))
    assert refused in (
        Reject(WorkerRefusal.STALE_VERSION),
        Reject(WorkerRefusal.SESSION_IS_RUNNING),
    )
    until(lambda: fleet.version(NAME) == 3)
    assert record(fleet).owner == here.unit
    assert serve_at(here, longer)["mode"] == "direct_append"


def test_a_turn_that_comes_as_it_is_handed_over_is_a_guests(fleet: Fleet) -> None:
    """It is answered as ever, and the owner, which has the state, goes on from what it has."""
    here, there = fleet.workers
    longer = first_turn(fleet)
    fleet.directory.slow_s = 1.0  # so long it takes to say that it is moved
    answers = []

    def race() -> None:
        answers.append(asked(there, Take(NAME, address(here))))

    racing = threading.Thread(target=race)
    racing.start()
    until(lambda: "Transfer" in fleet.directory.asked)
    assert_cold(MODEL, longer, serve_at(here, longer))
    racing.join(WAIT_S)
    fleet.directory.slow_s = 0.0
    assert isinstance(answers[0], SessionTaken), answers
    assert record(fleet).owner == there.unit
    answer = serve_at(there, longer)
    assert answer["cached"] == SEALED
    assert_cold(MODEL, longer, answer)


def test_one_wish_said_twice_is_done_once(fleet: Fleet) -> None:
    here, there = fleet.workers
    first_turn(fleet)
    frame = encode(Take(NAME, address(here)), Nonce(77))
    client = FramedClient(there.rpc.address, timeout_s=WAIT_S, key=None, read_bytes_max=1 << 20)
    first, again = (decode_answer(client.ask(frame)) for _ in range(2))
    client.close()
    assert isinstance(first, SessionTaken) and again == first
    assert moved(there, "came", "taken") == moved(here, "went", "moved") == 1
    # Another wish is refused: it is here.
    assert asked(there, Take(NAME, address(here))) == Reject(WorkerRefusal.UNKNOWN_SESSION)


def test_who_has_another_epoch_or_version_gets_nothing(fleet: Fleet) -> None:
    here, there = fleet.workers
    longer = first_turn(fleet)
    stands = asked(here, AskSession(NAME))
    assert isinstance(stands, SessionStands) and stands.epoch is not None
    former = Epoch(stands.epoch.term, stands.epoch.counter - 1)
    for version, epoch, reason in (
        (0, stands.epoch, WorkerRefusal.STALE_VERSION),
        (1, former, WorkerRefusal.STALE_EPOCH),
        (1, None, WorkerRefusal.STALE_EPOCH),
    ):
        wish = HandOver(NAME, version, there.unit, epoch)
        assert asked(here, wish) == Reject(reason)
    assert asked(here, Take(NAME, address(here))) == Reject(WorkerRefusal.WRONG_TARGET)
    serve_at(there, longer, epoch=stands.epoch)  # a guest's: it hands nothing over
    until(lambda: asked(there, AskSession(NAME)) == Reject(WorkerRefusal.NOT_OWNER))
    assert record(fleet).owner == here.unit
    assert serve_at(here, longer)["mode"] == "direct_append"


def test_it_stays_while_its_owner_does_not_say_what_it_holds(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not come, though there is some: that is no reason to have it computed."""
    here, there = fleet.workers
    longer = first_turn(fleet)

    async def silent(*_: object) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(TargetSide, "look", silent)
        assert asked(there, Take(NAME, address(here))) == Reject(WorkerRefusal.NOT_BROUGHT)
    assert record(fleet).owner == here.unit
    assert serve_at(here, longer)["mode"] == "direct_append"


def test_it_is_handed_over_though_nothing_of_it_is_left(fleet: Fleet) -> None:
    """Its owner's copy went elsewhere, or had to go: whoever takes it over computes it."""
    here, there = fleet.workers
    longer = first_turn(fleet)
    assert asked(here, ReleaseSession(NAME)) == Released()
    taken = asked(there, Take(NAME, address(here)))
    assert isinstance(taken, SessionTaken) and (taken.version, taken.tokens) == (1, 0)
    assert record(fleet).owner == there.unit
    assert_cold(MODEL, longer, serve_at(there, longer, epoch=taken.epoch))
    until(lambda: fleet.version(NAME) == 2)


def test_while_the_directory_is_silent_both_are_guests_and_then_it_is_moved(fleet: Fleet) -> None:
    here, there = fleet.workers
    longer = first_turn(fleet)
    fleet.directory.slow_s = 4.0
    assert asked(there, Take(NAME, address(here))) == Reject(WorkerRefusal.NO_ANSWER)
    for worker in (here, there):
        assert_cold(MODEL, longer, serve_at(worker, longer))
    fleet.directory.slow_s = 0.0
    until(lambda: fleet.owner(NAME) == there.unit)
    until(lambda: there.metric("ownerserve_sessions_owned") == 1)
    assert here.metric("ownerserve_sessions_owned") == 0


def test_a_target_that_owns_nothing_gets_no_session(fleet: Fleet) -> None:
    """The directory does not know it: the owner binds anew."""
    here = fleet.workers[0]
    longer = first_turn(fleet)
    stands = asked(here, AskSession(NAME))
    assert isinstance(stands, SessionStands)
    stranger = RoutingUnit(WorkerId("stranger"), 0, Incarnation(1))
    wish = HandOver(NAME, stands.version, stranger, stands.epoch)
    assert asked(here, wish) == Reject(WorkerRefusal.WRONG_TARGET)
    until(lambda: here.metric("ownerserve_sessions_owned") == 1)
    assert record(fleet).owner == here.unit
    assert serve_at(here, longer)["cached"] == SEALED
