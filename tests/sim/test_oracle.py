"""Oracles: Belady's bound by hand, foresight as an order, a fleet that holds everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.units import GIB
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.oracle.belady import TurnAccess, bound
from ownerserve.sim.oracle.horizon import NOW, PARTS, NextUse
from ownerserve.sim.oracle.infinite import infinite
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from ownerserve.trace.reuse import ideal_reuse
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options


def turn(name: str, reusable: int, context: int, worker: int = 0) -> TurnAccess:
    return TurnAccess(worker, name, reusable, context, context)


def test_who_comes_back_last_is_trimmed() -> None:
    # room for 150: when a has grown to 110, c comes back before it, so a's own tail goes
    order = [
        turn("a", 0, 100),
        turn("c", 0, 50),
        turn("a", 100, 110),
        turn("c", 50, 60),
        turn("a", 110, 120),
    ]
    told = bound(order, 150)
    assert told.prompt_tokens == 440
    assert told.cached_tokens == 100 + 50 + 100


def test_one_who_never_comes_back_goes_first() -> None:
    order = [turn("once", 0, 100), turn("a", 0, 100), turn("a", 100, 120)]
    assert bound(order, 120).cached_tokens == 100


def test_workers_do_not_share() -> None:
    order = [turn("a", 0, 100, worker=0), turn("a", 100, 110, worker=1)]
    assert bound(order, 1000).cached_tokens == 0
    assert bound([], 10).cached_token_share == 0.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=30),
    st.integers(1, 120),
)
def test_more_room_never_caches_less_and_all_room_caches_all(
    steps: list[tuple[str, int]], room: int
) -> None:
    context: dict[str, int] = {}
    order = []
    for name, added in steps:
        before = context.get(name, 0)
        context[name] = before + added
        order.append(turn(name, before, before + added))
    some, more, all_of_it = (bound(order, tokens) for tokens in (room, 2 * room, 10_000))
    assert some.cached_tokens <= more.cached_tokens <= all_of_it.cached_tokens
    assert all_of_it.cached_tokens == sum(min(a.reusable_tokens, a.prompt_tokens) for a in order)


@pytest.fixture(scope="module")
def setup() -> SimSetup:
    return SimSetup(workers=2, kv_bytes=8 * GIB, shape=WorkloadShape(mode=Capped(4)))


def test_an_infinite_fleet_caches_what_can_be_cached(setup: SimSetup) -> None:
    trace = generate("swe", Options(sessions=8, seed=3))
    limited = simulate(trace, setup).metrics
    best = simulate(trace, infinite(setup)).metrics
    reuse = ideal_reuse(trace)
    assert reuse is not None
    ideal, _ = reuse.shares()
    assert limited["cached_token_share"] <= best["cached_token_share"]
    assert best["cached_token_share"] == pytest.approx(ideal, abs=0.03)
    assert best["pressure"]["evictions"] == 0
    assert best["ttft_ms"]["mean"] <= limited["ttft_ms"]["mean"]


@pytest.mark.parametrize("workers", [1, 2])
def test_who_knows_the_future_caches_more(setup: SimSetup, workers: int) -> None:
    trace = generate("swe", Options(sessions=12, seed=3))
    tight = msgspec.structs.replace(setup, workers=workers, kv_bytes=4 * GIB // workers)
    told = msgspec.structs.replace(tight, oracle="horizon")
    plain, known = simulate(trace, tight).metrics, simulate(trace, told).metrics
    assert plain["pressure"]["evictions"] > 0
    assert known["cached_token_share"] > plain["cached_token_share"]
    assert simulate(trace, told).metrics == known


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_of_it_can_be_had_alone(setup: SimSetup, part: Any) -> None:
    trace = generate("swe", Options(sessions=6, seed=3))
    tight = msgspec.structs.replace(setup, kv_bytes=4 * GIB, oracle=part)
    assert simulate(trace, tight).metrics["success_rate"] == 1.0


def test_what_nobody_comes_back_to_goes_first_then_what_is_wanted_last() -> None:
    order = NextUse({"soon": 1.0, "late": 90.0, "here": NOW})
    dead, never, late, both, here = (
        order.key(stop(*names))
        for names in ((), ("never",), ("late",), ("late", "soon"), ("late", "here"))
    )
    assert dead == never < late < both < here


def stop(*names: str) -> Any:
    """What an order sees: a place in the tree at which these conversations stand."""
    return SimpleNamespace(heat=SimpleNamespace(anchors=dict.fromkeys(names), last_s=0.0))
