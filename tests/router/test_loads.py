"""Loads are dated: a worker's stamp, and this router's own dispatches since. Four routers agree."""

from __future__ import annotations

import gc
from collections import Counter
from statistics import mean

import pytest

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import WorkerId
from ownerserve.router.messages import Broken, Done, FirstByte, Stamped
from ownerserve.router.policies import make_policy
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker
from tests.support.router.closed_loop import Engine, play
from tests.support.router.fleets import ABLE, GIB, dispatched, fleet_of, load, raise_up, status

W0 = WorkerId("w0")


def alone() -> tuple[RouterState, Worker]:
    state = RouterState(make_policy("sticky"))
    raise_up(state, "w0")
    return state, state.fleet[W0]


def stamp(state: RouterState, as_of: float, heard: float, **load: int) -> None:
    state.handle(Stamped(status("w0", as_of, **load)), heard)


def test_a_stamp_shows_what_others_sent() -> None:
    state, worker = alone()
    stamp(state, 100.0, 5.0, pending=7000, running=3, free=20 * GIB)
    assert (worker.pending_tokens, worker.batch) == (7000, 3)
    assert worker.occupancy == pytest.approx(0.6)
    assert worker.pending_prefill_tokens == 0  # none of it is ours


def test_a_new_life_has_nothing_of_what_the_former_one_said() -> None:
    state, worker = alone()
    stamp(state, 100.0, 5.0, pending=7000, running=3, free=20 * GIB)
    assert (worker.queue_ms > 0, worker.load.kv_bytes_free) == (True, 20 * GIB)
    raise_up(state, "w0", life=2)
    assert (worker.pending_tokens, worker.batch, worker.queue_ms) == (0, 0, 0.0)
    assert (worker.load.kv_bytes_free, worker.occupancy) == (float("inf"), 0.0)
    state.check()


def test_dispatches_after_a_stamp_are_added_and_those_before_it_are_not_counted_twice() -> None:
    state, worker = alone()
    stamp(state, 1000.0, 0.0)  # the worker's clock is 1,000 s ahead
    dispatched(state, "a", 1.0, prompt_bytes=4000)
    assert worker.pending_tokens == 1000
    # Given at 2.0 on our clock: it has seen the first, not the second.
    dispatched(state, "b", 3.0, prompt_bytes=8000)
    stamp(state, 1002.0, 3.5, pending=1000, running=1)
    assert (worker.pending_tokens, worker.batch) == (3000, 2)
    stamp(state, 1004.0, 4.0, pending=2500, running=2)
    assert (worker.pending_tokens, worker.batch) == (2500, 2)


def test_what_ends_after_a_stamp_comes_off_it() -> None:
    state, worker = alone()
    first = dispatched(state, "a", 1.0, prompt_bytes=4000)
    stamp(state, 2.0, 2.0, pending=1500, running=2)  # ours and another's
    state.handle(FirstByte(first.receipt), 3.0)
    assert worker.pending_tokens == 500
    state.handle(Broken(first.receipt), 4.0)
    assert (worker.pending_tokens, worker.batch) == (500, 1)


def test_the_stamp_of_an_answer_has_that_answers_prefill_behind_it() -> None:
    state, worker = alone()
    first = dispatched(state, "a", 1.0, prompt_bytes=4000)
    state.handle(FirstByte(first.receipt, status("w0", 2.0, pending=300, running=2)), 2.0)
    assert worker.pending_tokens == 300
    state.handle(Done(first.receipt, status=status("w0", 3.0, pending=300, running=1)), 3.0)
    assert (worker.pending_tokens, worker.batch) == (300, 1)


def test_an_older_stamp_that_comes_late_is_ignored() -> None:
    state, worker = alone()
    stamp(state, 10.0, 1.0, pending=10)
    stamp(state, 9.0, 2.0, pending=9999)
    assert worker.pending_tokens == 10


def test_estimates_never_go_below_nothing_and_receipts_are_single_use() -> None:
    state, worker = alone()
    first = dispatched(state, "a", 1.0, prompt_bytes=40_000)
    stamp(state, 2.0, 2.0, pending=50, running=0)  # our estimate was too high
    state.handle(Broken(first.receipt), 3.0)
    assert (worker.pending_tokens, worker.batch, worker.requests) == (0, 0, 0)
    with pytest.raises(InvariantViolated, match="invariant 5"):
        state.handle(Broken(first.receipt), 4.0)


def test_the_order_follows_every_change() -> None:
    fleet = fleet_of(*[ABLE] * 40)
    candidates = fleet.candidates(None)
    for step in range(200):
        worker = list(fleet)[step * 7 % 40]
        load(worker, pending=step * 37 % 1000 + 1)
        if step % 3 == 0:
            least = candidates.least(5)
            loads = sorted(one.queue_ms for one in fleet)
            assert [one.queue_ms for one in least] == loads[:5]
    fleet.check()


def test_four_routers_that_share_a_burst_spread_it_by_stamps() -> None:
    """Each sends 16 prompts in turn and hears a stamp of one worker before each: no herd."""
    routers = [RouterState(make_policy("least_load")) for _ in range(4)]
    sent: Counter[str] = Counter()
    for router in routers:
        raise_up(router, "w0", "w1", "w2", "w3")
    for number in range(16):
        for index, router in enumerate(routers):
            now = number + index / 4
            for worker in ("w0", "w1", "w2", "w3"):
                stamped = status(worker, now - 0.01 + 500.0, pending=1000 * sent[worker])
                router.handle(Stamped(stamped), now)
            sent[dispatched(router, None, now).worker] += 1
    assert set(sent.values()) == {16}


@pytest.mark.parametrize("policy", ["least_load", "ownerserve"])
def test_four_routers_in_a_closed_loop(policy: str) -> None:
    """They see each other's work by stamps only; without stamps the same fleet waits longer."""

    def mean_wait_s(clocks_s: float, *, stamping: type[Engine]) -> float:
        engines = [stamping(f"w{n}", room_tokens=3_000_000, clock_s=clocks_s * n) for n in range(8)]
        routers = [RouterState(make_policy(policy)) for _ in range(4)]
        outcome = play(
            routers, engines, sessions=64, turns=12, gap_s=20.0,
            tokens=lambda number: (2000, 20_000, 80_000)[number % 3], seed=3,
        )  # fmt: skip
        return mean(wait for turns in outcome.turns.values() for _, _, wait in turns)

    stamped = mean_wait_s(1000.0, stamping=Engine)
    blind = mean_wait_s(1000.0, stamping=Silent)
    assert stamped < (0.8 if policy == "least_load" else 1.05) * blind


class Silent(Engine):
    """An engine that does not say what it has before it."""

    def stamp(self, now: float) -> None:
        return None


def test_a_fleet_that_nobody_needs_any_more_is_freed() -> None:
    """Structs that the collector does not look into (gc=False) must stand in no ring."""

    def workers() -> int:
        gc.collect()
        gc.collect()  # what they held is let go in a second round
        return sum(type(one) is Worker for one in gc.get_objects())

    gc.freeze()  # only what is made from here on is looked at
    state = RouterState(make_policy("ownerserve"))
    raise_up(state, "w0", "w1")
    for number in range(8):
        dispatched(state, f"s{number % 3}", float(number), prompt_bytes=40_000)
    assert workers() == 2
    del state
    assert workers() == 0
    gc.unfreeze()


def test_a_turn_that_is_over_counts_no_more_with_a_stamp_of_before_it() -> None:
    state, worker = alone()
    stamp(state, 100.0, 0.0)
    turn = dispatched(state, "a", 1.0, prompt_bytes=4000)
    state.handle(Done(turn.receipt), 2.0)
    stamp(state, 100.5, 2.5)  # made before the turn came
    assert (worker.pending_tokens, worker.batch) == (0, 0)


def test_a_former_lifes_stamp_says_nothing_of_the_present_one() -> None:
    state, worker = alone()
    raise_up(state, "w0", life=2)
    state.handle(Stamped(status("w0", 200.0, pending=9000, running=4)), 5.0)
    assert (worker.pending_tokens, worker.batch) == (0, 0)
    state.handle(Stamped(status("w0", 201.0, pending=500, running=1, incarnation=2)), 6.0)
    assert (worker.pending_tokens, worker.batch) == (500, 1)
