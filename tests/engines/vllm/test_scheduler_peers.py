"""What the connector's scheduler side makes of state that a peer holds: a fake vLLM scheduler, and
a look-up that answers for a peer too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.engines.vllm.worker_commands import WorkerStepReport
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit, Tier
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import AskLine
from ownerserve.node.transfers.bringing import BringNews
from ownerserve.plan.cost.events import Loaded
from tests.support.vllm_parts.fake_vllm.play import Play
from tests.support.vllm_parts.fake_vllm.side import Setup

pytestmark = pytest.mark.engine

AGENT = SessionId("a" * 32)
PEER = LenderAddress(RoutingUnit(WorkerId("peer"), 0, Incarnation(1)), "tcp://127.0.0.1:1")
PROMPT = list(range(30))


@pytest.fixture
def play() -> Iterator[Play]:
    """An engine core; what was computed under it is at a peer alone, and a gateway says so."""
    play = Play(Setup("dense", 1, "full", 100), drafts=0, ahead=False)
    play.arrive(PROMPT, max_tokens=1)
    play.finish()
    play.forget_cache()
    (rank,) = play.engine.ranks
    play.engine.lookup.lent.update(rank.store)
    rank.store.clear()
    play.engine.sessions.heard(AskLine(AGENT, bring_from=PEER))
    yield play
    play.end()


def test_what_a_peer_holds_is_brought_by_the_worker_and_stored_here(play: Play) -> None:
    lent = dict(play.engine.lookup.lent)
    request = play.arrive(PROMPT, max_tokens=2, session_id=AGENT)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    (rank,) = play.engine.ranks
    (load,) = (loading.load for loading in rank.loading.values())
    assert load.offers.keys() == {want.id for want in load.wants}
    assert {offer.lender for offer in load.offers.values()} == {PEER}
    play.bring(0, 0, "")
    play.finish()
    assert lent.keys() <= rank.store.keys(), "what came is stored here too"
    came = play.engine.sessions.came_of(AskLine(AGENT, request_id=request.request_id))
    assert came is not None and came.mode is ExecutionMode.FETCH
    assert came.brought.keys() == {"peer"}, "and its answer says where it came from"


def test_a_peer_that_gives_nothing_costs_a_load_and_the_prompt_is_computed(play: Play) -> None:
    request = play.arrive(PROMPT, max_tokens=2, session_id=AGENT)
    play.look_up()
    play.schedule()
    play.answer(accepted=0)
    play.bring(0, 0, "absent")
    play.finish()
    assert request.is_finished()
    assert play.seen["failed loads"] == 1


def test_nobody_is_asked_for_a_turn_of_which_nobody_was_named(play: Play) -> None:
    play.arrive(PROMPT, max_tokens=1, session_id=AGENT)
    play.finish()
    loads = play.seen["loads"]
    play.forget_cache()
    (rank,) = play.engine.ranks
    rank.store.clear()
    play.arrive(PROMPT, max_tokens=1, session_id=AGENT)  # the word was of the turn before
    play.finish()
    assert play.seen["loads"] == loads


def test_what_was_lent_and_brought_is_told_once_with_the_engines_counts(play: Play) -> None:
    side = play.engine.side
    side.counting.take()
    play.engine.lent["ownerserve_lends:returned"] = 2
    brought = "ownerserve_brought:brought"
    timings = (Loaded(Tier.PEER, 1 << 20, 3.0),)
    for _ in range(2):
        side.reported(WorkerStepReport(brought=(BringNews({brought: 1}, timings),)))
    told = side.counting.take()
    assert (told[brought], told["ownerserve_lends:returned"]) == (2, 2)
    play.engine.lent["ownerserve_lends:returned"] = 3
    side.reported(WorkerStepReport(brought=(BringNews({brought: 1}),)))
    told = side.counting.take()
    assert (told[brought], told["ownerserve_lends:returned"]) == (1, 1)
    assert side.status()[brought] == 3
    assert "peer" in play.engine.calibration.model.prices().measured_s, "and what it took is learnt"
