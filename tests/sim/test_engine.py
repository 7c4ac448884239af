"""Continuous batching by hand: which step takes how long, who has room, who is thrown out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.prefix import pack
from ownerserve.sim.engine.batch import BatchLimits
from tests.support.sim.engine_driver import HYBRID, EngineDriver, U, make_engine, own_ids, turn


def test_a_prefill_samples_the_first_token_and_decodes_are_one_event() -> None:
    driver = EngineDriver(make_engine())
    sequence = driver.arrive(turn(1, own_ids(1), 10, 4))
    driver.run()
    assert driver.steps == [20.0, 33.0]  # 10 + 10 tokens; 3 x (10 + 1 decode)
    assert sequence.first_token_s == pytest.approx(0.020)
    assert driver.done == [("t1", 53.0)]
    counts = driver.engine.counts
    assert (counts.steps, counts.prefill_tokens, counts.decoded_tokens) == (4, 10, 3)
    assert driver.engine.pending_tokens == 0


def test_each_decode_step_of_a_fold_sees_one_token_more() -> None:
    driver = EngineDriver(make_engine(d_ms=1.0))
    driver.arrive(turn(1, own_ids(1), 10, 4))
    driver.run()
    assert driver.steps == [20.0, 11 + 10 + 11 + 11 + 11 + 12]


def test_a_second_turn_computes_only_what_is_new() -> None:
    driver = EngineDriver(make_engine())
    driver.arrive(turn(1, own_ids(1), 10, 4, session="s"))
    driver.run()  # 13 tokens were computed: 3 units are full
    later = driver.arrive(turn(2, own_ids(1), 14, 1, session="s"))
    driver.run()
    assert later.restored_tokens == 12 and later.computed_tokens == 2
    assert driver.steps[-1] == 12.0


def test_of_a_prompt_that_is_all_there_the_last_unit_is_computed_again() -> None:
    driver = EngineDriver(make_engine())
    for number in (1, 2):
        driver.arrive(turn(number, own_ids(1), 12, 1))
        driver.run()
    assert driver.steps == [22.0, 14.0]


def test_long_prompts_are_computed_in_chunks_beside_decodes() -> None:
    driver = EngineDriver(make_engine(limits=BatchLimits(8, 8)))
    driver.arrive(turn(1, own_ids(1), 4, 6))
    driver.step()  # 4 tokens
    long = driver.arrive(turn(2, own_ids(2), 20, 1))
    driver.run()
    # A decode takes one of 8 tokens: 7 + 7 + 6 of prefill, each beside it; then 2 decodes alone.
    assert driver.steps == [14.0, 18.0, 18.0, 17.0, 22.0]
    assert long.first_token_s == pytest.approx(0.067)
    counts = driver.engine.counts
    assert counts.interfered_ms == pytest.approx(7 + 7 + 6)
    assert counts.decoding_ms == pytest.approx(18 + 18 + 17 + 22)


def test_sequences_beyond_the_limit_wait() -> None:
    driver = EngineDriver(make_engine(limits=BatchLimits(64, 1)))
    driver.arrive(turn(1, own_ids(1), 4, 3))
    second = driver.arrive(turn(2, own_ids(2), 4, 1))
    driver.run()
    assert second.begun_s == pytest.approx(0.014 + 2 * 0.011)


def test_no_room_throws_out_the_youngest_which_goes_on_where_it_was() -> None:
    # 6 units; each turn ends with ceil(19 / 4) = 5 of them.
    driver = EngineDriver(make_engine(blocks=6))
    old = driver.arrive(turn(1, own_ids(1), 8, 12))
    young = driver.arrive(turn(2, own_ids(2), 8, 12))
    driver.run()
    assert (old.preempted, young.preempted) == (0, 1)
    assert [turn_id for turn_id, _ in driver.done] == ["t1", "t2"]
    # Both have 3 units at 12 tokens, after 5 sampled. The young one comes back with 8 + 5 tokens.
    assert young.target == 13 and young.left == 0
    assert driver.engine.counts.preemptions == 1


def test_nobody_is_let_in_without_room_for_the_whole_prompt() -> None:
    driver = EngineDriver(make_engine(blocks=8, limits=BatchLimits(8, 8)))
    driver.arrive(turn(1, own_ids(1), 8, 9))  # 2 units, then 4
    long = driver.arrive(turn(2, own_ids(2), 28, 1))  # 7 units: its first chunk alone would fit
    driver.run()
    assert long.preempted == 0 and driver.engine.counts.preemptions == 0
    assert long.begun_s == pytest.approx(driver.done[0][1] / 1000.0)


def test_a_lend_keeps_no_room_from_who_is_let_in() -> None:
    driver = EngineDriver(make_engine(blocks=8))
    driver.arrive(turn(1, own_ids(1), 28, 1))
    driver.run()
    lends = driver.engine.cache.lends
    ticket = lends.lend([pack(own_ids(1)[:7])], driver.now, idle_s=1000.0)
    driver.arrive(turn(2, own_ids(2), 28, 1))
    driver.run()
    assert [name for name, _ in driver.done] == ["t1", "t2"] and not driver.failed
    assert not lends.stands(ticket)


def test_what_can_never_fit_fails_and_the_next_one_runs() -> None:
    driver = EngineDriver(make_engine(blocks=4))
    driver.arrive(turn(1, own_ids(1), 40, 1))
    driver.arrive(turn(2, own_ids(2), 8, 1))
    driver.run()
    assert driver.failed == ["t1"] and [name for name, _ in driver.done] == ["t2"]


def test_an_answer_that_outgrows_the_device_fails() -> None:
    driver = EngineDriver(make_engine(blocks=4))
    driver.arrive(turn(1, own_ids(1), 8, 40))
    driver.run()
    assert driver.failed == ["t1"] and driver.done == []


def test_a_prompt_that_has_landed_computes_one_token() -> None:
    driver = EngineDriver(make_engine())
    driver.arrive(turn(1, own_ids(1), 12, 1))
    driver.run()
    landed = driver.arrive(turn(2, own_ids(1), 14, 2), landed=14)
    driver.run()
    assert landed.restored_tokens == 13 and landed.computed_tokens == 1
    assert driver.steps[1:] == [11.0, 11.0]


def test_what_has_landed_and_was_evicted_is_computed() -> None:
    driver = EngineDriver(make_engine())
    gone = driver.arrive(turn(2, own_ids(1), 14, 1), landed=14)
    driver.run()
    assert gone.restored_tokens == 0 and gone.computed_tokens == 14


def test_point_state_is_kept_at_the_prompts_last_boundary_and_the_answers() -> None:
    # Boundaries every 8 tokens. 20 tokens of prompt: state at 16; the answer ends at 16 + 8.
    driver = EngineDriver(make_engine(layout=HYBRID))
    driver.arrive(turn(1, own_ids(1), 20, 8, session="s"))
    driver.run()
    assert driver.engine.counts.steps == 8
    again = driver.arrive(turn(2, own_ids(1), 30, 1, session="s"))
    driver.run()
    assert again.restored_tokens == 24
    fork = driver.arrive(turn(3, [*own_ids(1)[:5], *own_ids(3)], 30, 1))
    driver.run()
    assert fork.restored_tokens == 16


def test_a_prefill_thrown_out_at_a_boundary_goes_on_from_there() -> None:
    driver = EngineDriver(make_engine(layout=HYBRID, blocks=20, limits=BatchLimits(17, 8)))
    engine = driver.engine
    driver.arrive(turn(1, own_ids(1), 4, 30))
    driver.step()
    long = driver.arrive(turn(2, own_ids(2), 60, 1))
    driver.step()  # 16 tokens beside a decode: a boundary, at which nobody asked for state
    engine._preempt_youngest(driver.now)  # noqa: SLF001 - pressure picks moments of its own
    engine.check()
    driver.run()
    assert long.preempted == 1 and long.computed_tokens == 60


def test_a_fold_is_shortened_to_the_step_under_way() -> None:
    engine = make_engine()
    driver = EngineDriver(engine)
    sequence = driver.arrive(turn(1, own_ids(1), 10, 11))
    driver.step()
    assert engine.start(0.02) == pytest.approx(0.110)
    assert engine.shorten(0.034, 0.054) == pytest.approx(0.044)  # in the fourth step
    assert engine.shorten(0.034, 0.054) is None  # it stands already
    engine.end(0.064)
    assert sequence.position == 14 and sequence.left == 6
    engine.check()


TURNS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(TURNS, st.integers(18, 40), st.sampled_from([BatchLimits(16, 4), BatchLimits(64, 8)]))
def test_everything_ends_and_every_token_is_sampled_once(
    turns: list[tuple[int, int, int]], blocks: int, limits: BatchLimits
) -> None:
    """Whatever the pool: what can fit alone is served."""
    driver = EngineDriver(make_engine(blocks=blocks, limits=limits))
    for number, (prompt, output, head) in enumerate(turns):
        ids = [*own_ids(900 + head)[: min(prompt // U, 5)], *own_ids(number + 1)]
        driver.arrive(turn(number, ids, prompt, output))
    driver.run()
    assert len(driver.done) == len(turns) and not driver.failed
    assert not driver.engine.everyone() and driver.engine.pending_tokens == 0
    counts = driver.engine.counts
    sampled = counts.decoded_tokens + len(turns) + counts.preemptions
    assert sampled >= sum(output for _, output, _ in turns)
    assert counts.decoded_tokens <= sum(output for _, output, _ in turns)
