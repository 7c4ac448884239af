"""What an engine core of vLLM's says before a turn comes: whether it would take it, and what is
here of its session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.node_rpc import (
    ADDRESS_FILE,
    EngineLimits,
    NodeRpcHandler,
)
from ownerserve.engines.vllm.scheduler_side.owning import SessionsHere
from ownerserve.engines.vllm.scheduler_side.worker_reports import WorkerReports
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    NEWS_WAIT_MS,
    Admit,
    ListHeld,
    PageIs,
    Probe,
    Reject,
    Released,
    ReleaseSession,
    Seed,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.status import RefillShare
from ownerserve.node.rpc.server import RpcClient
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import HF, ModelState
from ownerserve.plan.restore import Planner
from ownerserve.router.admission import SeatSettings, SessionAdmission, Wait
from ownerserve.router.entry.terms import ENTER
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import WorkerUp
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import Profile
from tests.support.node.node_driver import IDENTITY, LAYOUT
from tests.support.router.fleets import PLAIN, load

UNIT = RoutingUnit(WorkerId("v0"), 0, Incarnation(7))
S = SessionId("5" * 32)


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Holding]:
    names = RecordNames(IDENTITY, LAYOUT, engine="toy/1", blocks=4)
    one = Holding(names, [tmp_path / "store"], tmp_path / "sessions", can_replay=False)
    yield one
    one.close()


@pytest.fixture
def handler(holding: Holding, tmp_path: Path) -> Iterator[NodeRpcHandler]:
    limits = EngineLimits(unit=UNIT, model="m", sequence_tokens=1000, max_waiting=1, token_bytes=10)
    one = NodeRpcHandler(limits, holding, SessionsHere(None))
    one.open(tmp_path)
    one.stepped({}, free_tokens=800, total_tokens=800)
    yield one
    one.close()


@pytest.fixture
def client(handler: NodeRpcHandler, tmp_path: Path) -> Iterator[RpcClient]:
    one = RpcClient((tmp_path / ADDRESS_FILE).read_text())
    yield one
    one.close()


def test_what_the_store_has_of_a_session_is_said(client: RpcClient, holding: Holding) -> None:
    holding.inventory.has(S, Tier.DISK, 96, digest=None)
    assert client.ask(Probe(Seed(100), S)) == Admit(0, restorable_tokens=96)
    assert client.ask(Probe(Seed(100), SessionId("nobody's"))) == Admit(0, restorable_tokens=0)
    holding.over(S)
    assert client.ask(Probe(Seed(100), S)) == Admit(0, restorable_tokens=0)


def test_what_a_turn_would_do_with_it_is_said_by_the_engines_own_prices(
    client: RpcClient, holding: Holding
) -> None:
    """Not of a session of which nobody can say what is on the device: there is no pool here."""
    holding.inventory.has(S, Tier.DISK, 96, digest=None)
    planner = Planner(ModelState(layers=1, block_tokens=32, range_bytes_per_token=10.0), HF)
    holding.plans(planner, CostModel(UNMEASURED).prices())
    assert client.ask(Probe(Seed(100), S)) == Admit(0, restorable_tokens=96)


def test_a_prompt_within_the_engines_length_fits_its_memory(client: RpcClient) -> None:
    """Layers that look back a window, or keep one state, need less than a block of each group for
    their tokens: 800 by that count hold a sequence of 1,000, or vLLM would not have begun."""
    assert client.ask(Probe(Seed(1000), S)) == Admit(0, restorable_tokens=0)
    assert client.ask(Probe(Seed(1001), S)) == Reject(WorkerRefusal.TOO_LONG)


def test_who_names_no_session_hears_of_none_and_a_refusal_says_no_more(client: RpcClient) -> None:
    assert client.ask(Probe(Seed(100))) == Admit(0)
    assert client.ask(Probe(Seed(1001), S)) == Reject(WorkerRefusal.TOO_LONG)


def test_a_question_for_news_is_answered_with_the_next_word(
    client: RpcClient, holding: Holding
) -> None:
    """At once where there is one; else as it is said; with nothing where nothing is."""
    assert client.ask(ListHeld(0, 1)) == PageIs(Page(UNIT.incarnation))
    later = threading.Timer(0.2, holding.inventory.has, (S, Tier.DISK, 96), {"digest": None})
    later.start()
    answer = client.ask(ListHeld(0, NEWS_WAIT_MS))
    if answer == PageIs(Page(UNIT.incarnation)):  # the timer was late, on a busy machine
        later.join()
        answer = client.ask(ListHeld(0, NEWS_WAIT_MS))
    word = Has(1, S, "disk", 96)
    assert answer == PageIs(Page(UNIT.incarnation, last=1, words=(word,)))
    assert client.ask(ListHeld(0, NEWS_WAIT_MS)) == answer
    holding.over(S)
    gone = client.ask(ListHeld(1, NEWS_WAIT_MS))
    assert isinstance(gone, PageIs)
    assert gone.page.words == (Lost(2, S, "disk"),)


def test_the_engine_says_how_busy_it_was_and_not_what_it_can_not_know(
    handler: NodeRpcHandler, client: RpcClient
) -> None:
    """It has computed for longer than it lives: that counts as all of the time until then."""
    before = client.ask(Status())
    assert isinstance(before, StatusIs) and before.status.busy_share == 0.0
    handler.computed(3600.0)
    answer = client.ask(Status())
    assert isinstance(answer, StatusIs)
    assert answer.status.busy_share is not None and 0.0 < answer.status.busy_share <= 1.0
    assert answer.status.refill_shares == ()


@pytest.mark.parametrize("waits", [False, True], ids=["as it says", "did it say refills"])
def test_no_session_is_suspended_at_an_engine_that_can_not_know_what_refills_take(
    handler: NodeRpcHandler, client: RpcClient, *, waits: bool
) -> None:
    """Two sessions have outgrown the memory of an engine that is busy, and one's state went."""
    handler.computed(3600.0)
    said = client.ask(Status())
    assert isinstance(said, StatusIs)
    status = structs.replace(said.status, busy_share=0.9)  # on a slow machine it is less by now
    if waits:
        status = structs.replace(status, refill_shares=(RefillShare(1, 2.0),))
    fleet, long = Fleet(), DEFAULTS.long_tokens
    speed = structs.replace(PLAIN.speed, kv_bytes_per_token=8000 / long)
    profile = Profile(speed=speed, kv_bytes_total=status.kv_bytes_total)
    fleet.raise_up(WorkerUp(UNIT.worker, 0, UNIT.incarnation, profile))
    for worker in fleet:
        worker.stamp(status, 0.0)
        load(worker, sequences=1)
    room = SessionAdmission(fleet, SeatSettings(growth_tokens=0))
    both = S, SessionId("other")
    assert [room.ask(one, long // 4, parent=None, now_s=0.0) for one in both] == [ENTER, ENTER]
    for name in both:
        room.ended(name, long, 1.0)
    asked = room.ask(S, long, parent=None, now_s=2.0, absent_tokens=long)
    assert isinstance(asked, Wait) is waits


def test_what_went_elsewhere_is_told_to_an_idle_engine_with_the_next_request(
    handler: NodeRpcHandler, client: RpcClient
) -> None:
    """No step is built before that request has taken its room."""
    reports = WorkerReports(handler, None, component="kv", groups=(16,))
    assert client.ask(ReleaseSession(S)) == Released()
    request = SimpleNamespace(request_id="next", num_tokens=40)
    assert reports.arrived(request) == [S]
    assert reports.arrived(request) == []
