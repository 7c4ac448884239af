"""Every checkpoint policy keeps one contract; each keeps its own promise besides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.swa.accounting import WriteAccount, stored_bytes
from ownerserve.plan.swa.adaptive import (
    Adaptive,
    Economics,
    Weights,
    best_period,
    interior_cost,
)
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.plan.swa.checkpoints import (
    Branched,
    CheckpointPolicy,
    Full,
    Periodic,
    Produced,
    Resumed,
    StateSize,
    TurnEnd,
    TurnSpan,
    Zero,
)
from tests.support.examples import examples

V4_PRO = Economics(point_bytes=5_140_000, ms_per_token=0.05, load_ms=2.0, replay_tokens=7747)
SIZE = StateSize(point_bytes=5_140_000, row_bytes_per_token=35_624.0, other_bytes=615_680)

POLICIES: dict[str, Callable[[], CheckpointPolicy]] = {
    "full": Full,
    "periodic": lambda: Periodic(1000),
    "zero": Zero,
    "turn-end": TurnEnd,
    "adaptive": lambda: Adaptive(V4_PRO),
    "branches": lambda: Branches(PointCost(5_140_000, 5511.0, has_lead=True)),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


@st.composite
def turns(draw: st.DrawFn) -> TurnSpan:
    start = draw(st.integers(0, 5000))
    prompt_end = start + draw(st.integers(0, 5000))
    return TurnSpan(start, prompt_end, prompt_end + draw(st.integers(0, 3000)), 128)


@every_policy
@settings(max_examples=examples(40), deadline=None)
@given(turn=turns())
def test_checkpoints_are_boundaries_of_the_turn_ascending_and_repeatable(
    name: str, turn: TurnSpan
) -> None:
    policy = POLICIES[name]()
    chosen = policy.checkpoints(turn)
    for positions in (chosen, policy.chunk_ends(turn)):
        assert all(a < b for a, b in pairwise(positions))
        assert all(turn.start < at <= turn.end and at % 128 == 0 for at in positions)
    assert policy.checkpoints(turn) == chosen
    assert policy.name == name


@every_policy
@settings(max_examples=examples(40), deadline=None)
@given(turn=turns())
def test_no_policy_writes_more_than_full_or_less_than_zero(name: str, turn: TurnSpan) -> None:
    written = POLICIES[name]().written_bytes(turn, SIZE)
    assert Zero().written_bytes(turn, SIZE) == 0 <= written
    if len(POLICIES[name]().checkpoints(turn)) * 128 <= turn.end - turn.start:
        assert written <= Full().written_bytes(turn, SIZE) + 3 * SIZE.point_bytes


@every_policy
def test_what_is_observed_never_makes_a_policy_leave_the_turn(name: str) -> None:
    policy = POLICIES[name]()
    turn = TurnSpan(0, 9_000, 9_500, 128)
    for _ in range(50):
        policy.observe(Produced(turn))
        policy.observe(Branched(4_000))
        policy.observe(Resumed(9_472))
    assert all(0 < at <= 9_500 for at in policy.checkpoints(turn))


def test_turn_end_keeps_what_a_resend_an_extension_and_the_next_turn_hit() -> None:
    assert TurnEnd().checkpoints(TurnSpan(0, 1536, 1700, 128)) == (1408, 1536, 1664)
    assert TurnEnd().checkpoints(TurnSpan(0, 1537, 1700, 128)) == (1536, 1664)
    assert TurnEnd().checkpoints(TurnSpan(1664, 1670, 1700, 128)) == ()


def test_branches_keeps_turn_ends_and_where_the_prompt_parts_from_what_is_stored() -> None:
    policy = Branches(PointCost(5_140_000, 5511.0, has_lead=True))
    assert policy.checkpoints(TurnSpan(0, 1536, 1700, 128, junctions=(700,))) == (
        640,
        1408,
        1536,
        1664,
    )
    assert policy.checkpoints(TurnSpan(1024, 1537, 1700, 128, junctions=(700,))) == (1536, 1664)


@pytest.mark.parametrize(
    ("point_bytes", "range_bytes_per_token", "spacing"),
    [
        (4_681_728, 36_864.0, 2048),  # gpt-oss-120b
        (5_140_000, 5511.0, 8192),  # DeepSeek-V4-Pro
        (77_300_000, 24_576.0, 8192),  # Qwen3-Next-80B
    ],
)
def test_chunk_ends_are_kept_where_a_point_is_cheap_beside_the_range_state_between_two(
    point_bytes: int, range_bytes_per_token: float, spacing: int
) -> None:
    cost = PointCost(point_bytes, range_bytes_per_token, has_lead=True)
    ends = Branches(cost).chunk_ends(TurnSpan(5000, 50_000, 60_000, 64))
    assert ends == tuple(range(5000 // spacing * spacing + spacing, 50_000, spacing))


def test_chunk_ends_of_dear_points_are_farther_apart_the_deeper_they_are() -> None:
    gemma_3_27b = Branches(PointCost(435_900_000, 81_920.0, has_lead=True))
    assert gemma_3_27b.chunk_ends(TurnSpan(0, 50_000, 60_000, 64)) == (
        8192,
        12_288,
        18_432,
        27_648,
        41_472,
    )
    assert gemma_3_27b.chunk_ends(TurnSpan(12_288, 18_432, 60_000, 64)) == ()
    assert gemma_3_27b.chunk_ends(TurnSpan(12_288, 18_433, 60_000, 64)) == (18_432,)


def test_a_point_that_weighs_more_than_all_before_it_is_no_chunk_end() -> None:
    command_a = PointCost(805_000_000, 65_536.0, has_lead=True)
    assert Branches(command_a).chunk_ends(TurnSpan(0, 20_000, 60_000, 64)) == (12_288, 18_432)
    assert command_a.first_chunk_end(64) == 12_288
    windows_alone = PointCost(1_000_000, 0.0, has_lead=True)
    assert Branches(windows_alone).chunk_ends(TurnSpan(0, 50_000, 60_000, 64)) == ()
    assert windows_alone.first_chunk_end(64) == 0


def test_a_cheap_point_before_a_prompts_end_stands_in_for_a_lead() -> None:
    turn = TurnSpan(0, 1600, 1700, 256)
    v4_pro = PointCost(5_140_000, 5511.0, has_lead=False)
    assert Branches(v4_pro).chunk_ends(turn) == (1280,)
    assert Branches(v4_pro).chunk_ends(TurnSpan(1024, 1600, 1700, 256)) == (1280,)
    assert Branches(v4_pro).chunk_ends(TurnSpan(1025, 1600, 1700, 256)) == (), "a short turn"
    led = msgspec.structs.replace(v4_pro, has_lead=True)
    dear = msgspec.structs.replace(v4_pro, point_bytes=3 * v4_pro.point_bytes)
    assert Branches(led).chunk_ends(turn) == Branches(dear).chunk_ends(turn) == ()


def test_points_get_the_share_of_a_store_that_they_weigh() -> None:
    def share(point_bytes: int, range_bytes_per_token: float) -> float:
        return PointCost(point_bytes, range_bytes_per_token, has_lead=True).store_share

    assert share(4_681_728, 36_864.0) == 0.2, "gpt-oss-120b: 3 %"
    assert share(435_900_000, 81_920.0) == pytest.approx(0.565, abs=0.001), "Gemma-3-27B"
    assert share(1_000_000, 0.0) == 0.8, "nothing but windows"


def test_full_is_about_eight_times_the_compressed_kv_on_v4_pro() -> None:
    # V4 report: 61 layers x 584 B a token against 4,521 B a token of main KV.
    written = Full().written_bytes(TurnSpan(0, 100_000, 100_000, 128), StateSize(0, 61 * 584.0))
    assert written / (100_000 * 4521) == pytest.approx(7.9, abs=0.05)


@pytest.mark.parametrize("replay", [7747, 2286, 700, None])
@pytest.mark.parametrize("rate", [0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-1])
@pytest.mark.parametrize("load_ms", [0.0, 2.0, 200.0])
def test_the_closed_form_period_is_the_best_of_all_boundaries(
    replay: int | None, rate: float, load_ms: float
) -> None:
    economics = Economics(5_140_000, 0.05, load_ms, replay)
    weights = Weights()

    again = weights.latency + weights.gpu
    # The cost of a branch i boundaries after a checkpoint, one by one.
    branches = [
        again * 0.05 * i * 128 + weights.latency * load_ms
        if i * 128 < economics.reach
        else again * 0.05 * economics.reach
        for i in range(600)
    ]
    until = list(accumulate(branches))

    def by_hand(period: float) -> float:
        """J(p): its branches fall on every boundary of a period alike."""
        if period == inf:
            return rate * again * 0.05 * economics.reach if rate else 0.0
        places = int(period) // 128
        return weights.write_per_byte * 5_140_000 / period + rate * until[places - 1] / places

    found = best_period(economics, weights, block_tokens=128, rate=rate)
    searched = [128.0 * k for k in range(1, 600)] + [inf]
    best = min(searched, key=by_hand)
    if found == inf or found <= searched[-2]:
        cost = interior_cost(found, economics, weights, block_tokens=128, rate=rate)
        assert cost == pytest.approx(by_hand(found), rel=1e-9)
        assert by_hand(found) <= by_hand(best) * 1.001 + 1e-15


def test_adaptive_follows_the_reuse_it_sees() -> None:
    policy = Adaptive(V4_PRO)
    turn = TurnSpan(0, 20_000, 20_400, 128)
    assert policy.period(128) == inf, "no branch was ever seen"
    for _ in range(300):
        policy.observe(Produced(turn))
        policy.observe(Branched(7_000))
    often = policy.period(128)
    assert often < 7747
    for _ in range(2_000):
        policy.observe(Produced(turn))
    assert policy.period(128) > often, "branches stopped"
    assert policy.checkpoints(turn) == (), "and no turn end was resumed for 2,000 turns"


def test_adaptive_keeps_turn_ends_that_are_resumed_and_drops_those_near_a_checkpoint() -> None:
    policy = Adaptive(V4_PRO)
    for _ in range(50):
        policy.observe(Produced(TurnSpan(0, 20_000, 20_400, 128)))
        policy.observe(Resumed(20_352))
    assert policy.checkpoints(TurnSpan(0, 20_000, 20_400, 128))[-1] in (19_968, 20_352)
    # 128 tokens after the last one there is nothing to save: 12.8 ms against 2 ms of load + write.
    cheap = Adaptive(Economics(5_140_000, 0.001, 2.0, 7747))
    assert cheap.checkpoints(TurnSpan(0, 1_000, 1_200, 128)) == ()


def test_writes_are_accounted_with_headers_and_padding() -> None:
    assert stored_bytes(1) == 8192
    assert stored_bytes(4096, records=2) == 2 * 8192
    assert stored_bytes(0) == 0
    account = WriteAccount()
    assert account.write_amplification == account.point_bytes_written_per_read == 0.0
    account.wrote_range(1 << 20)
    account.wrote_points(1 << 20, records=1)
    assert account.write_amplification == pytest.approx(2.0, abs=0.01)
    assert account.point_bytes_written_per_read == inf
    account.read_point(1 << 19)
    assert account.point_bytes_written_per_read == 2.0


def test_bad_input_is_named() -> None:
    with pytest.raises(InvalidInput, match="period_tokens"):
        Periodic(0)
    with pytest.raises(InvalidInput, match="turn"):
        TurnSpan(10, 5, 20, 128)
    with pytest.raises(InvalidInput, match="economics"):
        Adaptive(Economics(1, 0.0, 1.0, None))
