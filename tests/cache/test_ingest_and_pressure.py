"""State from outside enters through one verified door; pressure is relieved before it hurts."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.cache.counters import LossCause
from ownerserve.cache.hetero import parts_of
from ownerserve.cache.ingest import HoldLevel
from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import (
    Arrival,
    Begun,
    CacheRefusal,
    CacheRefused,
    Inserted,
    NoRoom,
    Replay,
    SlotsReserved,
    Turn,
)
from ownerserve.cache.pressure import Checkpoint, EvictedState, Spill, Watermarks
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import HashedPrefix, hash_prefix
from tests.support.cache.cache_driver import HYBRID, B, Driver, blocks_of


def arrive(driver: Driver, tokens: bytes, points: tuple[int, ...] = ()) -> SlotsReserved:
    got = driver.arrive(tokens, points)
    assert isinstance(got, SlotsReserved), got
    return got


def test_a_verified_arrival_is_restorable() -> None:
    driver = Driver()
    got = arrive(driver, blocks_of(1, 2, 3), (3 * B,))
    assert driver.check_match(blocks_of(1, 2, 3, 4)).range_tokens == 0, "not before commit"
    assert driver.land(got.ticket) == Inserted(3 * B, 0)
    assert driver.turn("1", blocks_of(1, 2, 3, 4)).restored == 3 * B


def test_only_what_is_missing_is_fetched() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2))
    got = arrive(driver, blocks_of(1, 2, 3, 4))
    assert (got.start, len(got.blocks)) == (2 * B, 2)
    driver.land(got.ticket)


def test_a_wrong_digest_is_a_miss_and_frees_the_slots() -> None:
    driver = Driver()
    got = arrive(driver, blocks_of(1, 2), (B,))
    assert driver.land(got.ticket, b"other") == CacheRefused(CacheRefusal.DIGEST_MISMATCH)
    assert driver.check_match(blocks_of(1, 2)).range_tokens == 0
    assert driver.cache.occupancy.blocks.used == 0 and driver.cache.counters.quarantined == 1


def test_what_nobody_vouches_for_is_refused() -> None:
    """Invariant 4: each block of each component was stated by its producer and found here."""
    for missing in range(2):
        driver = Driver()
        got = arrive(driver, blocks_of(1, 2))
        parts = driver.parts(got.ticket)
        assert [part.component for part in parts] == ["main", "index"]
        del parts[missing]
        refused = CacheRefused(CacheRefusal.DIGEST_MISMATCH)
        assert driver.cache.ingest.commit(got.ticket, parts, 0.0) == refused
        driver.check()
        assert driver.cache.occupancy.blocks.used == 0 and driver.cache.counters.quarantined == 1


@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 3), (2, 3)])
def test_a_part_of_the_blocks_does_not_stand_for_all(first: int, end: int) -> None:
    driver = Driver()
    got = arrive(driver, blocks_of(1, 2, 3))
    parts = [
        msgspec.structs.replace(part, first=first, end=end) if part.component == "index" else part
        for part in driver.parts(got.ticket)
    ]
    assert isinstance(driver.cache.ingest.commit(got.ticket, parts, 0.0), CacheRefused)
    driver.check()


def test_a_producer_that_states_nothing_vouches_for_nothing() -> None:
    driver = Driver()
    got = arrive(driver, blocks_of(1))
    parts = [msgspec.structs.replace(p, stated=b"", found=b"") for p in driver.parts(got.ticket)]
    assert isinstance(driver.cache.ingest.commit(got.ticket, parts, 0.0), CacheRefused)


def test_pieces_in_any_order_make_a_whole() -> None:
    driver = Driver()
    got = arrive(driver, blocks_of(1, 2, 3))
    halves = [
        msgspec.structs.replace(part, first=first, end=end)
        for first, end in ((2, 3), (0, 1), (1, 2))
        for part in driver.parts(got.ticket)
    ]
    assert driver.land(got.ticket, parts=halves) == Inserted(3 * B, 0)


def test_a_component_of_a_point_that_was_not_written_is_not_there() -> None:
    """Its slot holds what another left in it: the device had the component when the load was
    planned, and lost it before the commit."""
    driver = Driver()
    got = arrive(driver, blocks_of(1, 2), (2 * B,))
    parts = [part for part in driver.parts(got.ticket) if part.component != "swa"]
    for name, slot in got.points[2 * B].items():
        driver.memory[name, slot] = b"another's"
    driver.land(got.ticket, parts=parts)
    assert driver.check_match(blocks_of(1, 2, 9)).points[0].lacks == ("swa",)
    assert [pool.used for pool in driver.cache.occupancy.points] == [0, 1]


def test_a_wrong_prefix_hash_never_gets_slots() -> None:
    driver = Driver()
    other = Arrival(blocks_of(1), hash_prefix(blocks_of(2), B)[-1])
    assert driver.cache.ingest.reserve(other, 0.0) == CacheRefused(CacheRefusal.PREFIX_MISMATCH)


def test_what_was_hashed_here_is_not_hashed_again_and_vouches_for_its_own_tokens_only() -> None:
    """Invariant 4: whoever passes a hashed prefix of other tokens gains nothing."""
    driver = Driver()
    hashed = HashedPrefix(B)
    hashed.grow(blocks_of(1, 2, 3))
    right = Arrival(blocks_of(1, 2), hashed.digests[1], hashed=hashed)
    assert isinstance(driver.cache.ingest.reserve(right, 0.0), SlotsReserved)
    longer = Arrival(blocks_of(1, 2), hashed.digests[2], hashed=hashed)
    other = Arrival(blocks_of(4), hashed.digests[0], hashed=hashed)
    for wrong in (longer, other):
        assert driver.cache.ingest.reserve(wrong, 0.0) == CacheRefused(CacheRefusal.PREFIX_MISMATCH)
    honest = Arrival(blocks_of(4), hash_prefix(blocks_of(4), B)[-1], hashed=hashed)
    assert isinstance(driver.cache.ingest.reserve(honest, 0.0), SlotsReserved)
    ragged = Arrival(blocks_of(1, tail=1), PrefixHash(b""))
    with pytest.raises(InvalidInput, match="whole blocks"):
        driver.cache.ingest.reserve(ragged, 0.0)


def test_two_producers_of_one_prefix_leave_one_copy() -> None:
    driver = Driver()
    first = arrive(driver, blocks_of(1, 2, 3), (3 * B,))
    second = arrive(driver, blocks_of(1, 2, 3), (3 * B,))
    driver.land(second.ticket)
    assert driver.land(first.ticket) == Inserted(3 * B, 3)
    rooms = driver.cache.occupancy
    assert rooms.blocks.used == 3 and [pool.used for pool in rooms.points] == [1, 1]


def test_an_arrival_without_room_for_its_point_leaves_its_blocks_to_others() -> None:
    driver = Driver(blocks=4, points=1)
    arrive(driver, blocks_of(1, 2), (2 * B,))
    before = driver.cache.occupancy.blocks.free
    assert isinstance(driver.arrive(blocks_of(3, 4), (2 * B,)), NoRoom)
    assert driver.cache.occupancy.blocks.free == before
    assert isinstance(driver.arrive(blocks_of(3, 4)), SlotsReserved)


def test_slots_of_a_lost_writer_stay_on_hold_until_it_is_quiet() -> None:
    driver = Driver(blocks=4)
    got = arrive(driver, blocks_of(1, 2, 3))
    driver.give_up(got.ticket)
    assert snapshot(driver.cache, 0.0).pools["main"].held == 3
    assert isinstance(driver.arrive(blocks_of(4, 5)), NoRoom)
    driver.now = 7.0
    holds = snapshot(driver.cache, driver.now).holds
    assert holds == {"store": HoldLevel(), "peer": HoldLevel(1, 3, 0, 7.0)}
    driver.quiet(got.ticket)
    assert snapshot(driver.cache, driver.now).holds["peer"] == HoldLevel()
    assert isinstance(driver.arrive(blocks_of(4, 5)), SlotsReserved)
    with pytest.raises(InvalidInput, match="not on hold"):
        driver.cache.ingest.quiet(got.ticket)


def test_an_idle_sessions_point_state_is_spilled_then_goes_first() -> None:
    driver = Driver(points=4)
    for number, name in enumerate("ab"):
        driver.now = float(number)
        driver.turn(name, blocks_of(number, 5, tail=1), session=name)
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.6, high=0.75, idle_s=10.0, tier="host", spills=1)
    driver.now = 20.0
    [spill] = pressure.relieve(driver.now)
    assert isinstance(spill, Spill) and spill.tier == "host"
    assert spill.points[0].prefix == blocks_of(0, 5) and spill.points[0].sessions == ("a",)
    assert snapshot(driver.cache, 0.0).pools["swa"].protected == 1
    assert driver.evict(100) == 2, "what is being copied out is not re-used"
    for index, pool in enumerate(driver.cache.occupancy.points):
        driver.cache.pressure.evict_points(index, 100)
        assert pool.used == 1, "nor its point state"
    pressure.spilled(spill.ticket)
    with pytest.raises(InvalidInput, match="open spill"):
        pressure.spilled(spill.ticket)
    driver.check()


def test_spilled_state_goes_before_what_must_be_computed_again() -> None:
    driver = Driver(points=2)
    driver.turn("1", blocks_of(0, 0, 0, 0, tail=1), session="a")  # four times as dear as b's
    driver.now = 1.0
    driver.turn("2", blocks_of(1, tail=1), session="b")
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.6, high=0.6, idle_s=0.5, tier="host", spills=2)
    [spill] = pressure.relieve(driver.now)
    assert isinstance(spill, Spill) and [p.sessions for p in spill.points] == [("a",)]
    pressure.spilled(spill.ticket)
    driver.cache.pressure.evict_points(0, 1)
    prompts = (blocks_of(0, 0, 0, 0, 9), blocks_of(1, 9))
    lacks = [bool(driver.check_match(prompt).points[0].lacks) for prompt in prompts]
    assert lacks == [True, False]


def test_watermarks_evict_in_one_run() -> None:
    driver = Driver(blocks=20)
    for number in range(5):
        driver.turn(str(number), blocks_of(number, 5, 6, 7))
    driver.cache.pressure.watermarks = Watermarks(low=0.1, high=0.5)
    runs = driver.cache.counters.evictions
    directives = driver.cache.pressure.relieve(0.0)
    driver.check()
    assert any(isinstance(d, EvictedState) and d.blocks == 10 for d in directives)
    assert driver.cache.counters.evictions == runs + 1
    assert driver.cache.pressure.relieve(0.0) == ()


def test_when_too_little_can_go_the_youngest_turn_is_checkpointed() -> None:
    driver = Driver(blocks=8)
    assert isinstance(driver.begin("old", blocks_of(1, 2, 3, 4)), Begun)
    assert isinstance(driver.begin("new", blocks_of(5, 6, 7, 8)), Begun)
    driver.prefill("old")
    driver.prefill("new")
    driver.cache.pressure.watermarks = Watermarks(low=0.1, high=0.5)
    assert Checkpoint((TurnId("new"),)) in driver.cache.pressure.relieve(0.0)


def test_nothing_is_looked_at_while_nothing_is_short() -> None:
    driver = Driver(blocks=20, points=20)
    driver.turn("1", blocks_of(1, 2))
    pressure = driver.cache.pressure
    assert not pressure.is_due and pressure.relieve(0.0) == ()
    pressure.watermarks = Watermarks(low=0.0, high=0.0)
    driver.turn("2", blocks_of(*range(10, 28)))
    assert driver.cache.occupancy.blocks.free == 0
    assert not pressure.is_due, "a watermark of 0 leaves all to demand"


def test_a_run_that_can_free_nothing_is_not_repeated_until_something_changes() -> None:
    driver = Driver(blocks=8)
    driver.begin("1", blocks_of(1, 2, 3, 4))
    driver.begin("2", blocks_of(5, 6, 7, 8))
    driver.prefill("1")
    driver.prefill("2")
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.1, high=0.5)
    [checkpoint] = pressure.relieve(0.0)
    assert isinstance(checkpoint, Checkpoint)
    assert not pressure.is_due and pressure.relieve(0.0) == ()
    driver.finish("1")
    assert pressure.is_due
    assert EvictedState(4, 0) in pressure.relieve(0.0)


def test_what_is_being_copied_out_is_not_evicted_twice_over() -> None:
    driver = Driver(blocks=100, points=10)
    for number in range(10):
        driver.turn(str(number), blocks_of(number, 7, tail=1), session=str(number))
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.2, high=0.4, idle_s=1.0, tier="host")
    [spill] = pressure.relieve(100.0)
    assert isinstance(spill, Spill) and len(spill.points) == 4
    assert pressure.relieve(100.0) == (), "the room is on its way"
    pressure.spilled(spill.ticket)
    assert pressure.relieve(100.0) == (EvictedState(0, 8),), (
        "4 of each component, and no second spill"
    )
    gone = [not driver.cache.match(p.prefix).points[0].lacks for p in spill.points]
    assert not any(gone), "what has a copy went"
    assert snapshot(driver.cache, 0.0).counters.evicted_points == {"swa": 4, "overlap": 4}
    driver.check()


def test_a_spill_that_fails_is_followed_by_a_plain_eviction() -> None:
    driver = Driver(blocks=100, points=4)
    for number in range(4):
        driver.turn(str(number), blocks_of(number, 7, tail=1), session=str(number))
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.3, high=0.5, idle_s=1.0, tier="host")
    [spill] = pressure.relieve(100.0)
    assert isinstance(spill, Spill)
    pressure.spill_failed(spill.ticket)
    assert pressure.relieve(100.0) == (EvictedState(0, 4),)
    counters = snapshot(driver.cache, 0.0).counters
    assert (counters.failed_spills, counters.spilled_points, counters.relief_runs) == (1, 0, 2)


def test_what_failed_to_be_copied_stays_dearer_than_what_is_cheap_to_compute() -> None:
    driver = Driver(points=2)
    driver.turn("1", blocks_of(0, 0, 0, 0, tail=1), session="a")  # four times as dear as b's
    driver.now = 1.0
    driver.turn("2", blocks_of(1, tail=1), session="b")
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.3, high=0.5, idle_s=1.0, tier="host", spills=1)
    [spill] = pressure.relieve(20.0)
    assert isinstance(spill, Spill) and spill.points[0].sessions == ("a",)
    pressure.spill_failed(spill.ticket)
    assert pressure.relieve(20.0) == (EvictedState(0, 2),)
    assert driver.cache.match(blocks_of(1, 9)).points[0].lacks
    assert not driver.cache.match(blocks_of(0, 0, 0, 0, 9)).points[0].lacks


def test_what_has_a_copy_is_not_copied_again() -> None:
    driver = Driver(points=4)
    for number, name in enumerate("abc"):
        driver.now = float(number)
        driver.turn(name, blocks_of(number, 5, tail=1), session=name)
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.6, high=0.75, idle_s=1.0, tier="host")
    pressure.backed(blocks_of(0, 5))
    spill = pressure.relieve(20.0)[0]
    assert isinstance(spill, Spill)
    assert [point.sessions for point in spill.points] == [("b",)]


def test_a_copy_made_elsewhere_makes_point_state_cheap() -> None:
    driver = Driver(points=2)
    driver.turn("1", blocks_of(0, 0, 0, 0, tail=1), session="a")  # four times as dear as b's
    driver.turn("2", blocks_of(1, tail=1), session="b")
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.3, high=0.5, tier="host")
    pressure.backed(blocks_of(0, 0, 0, 0))
    pressure.backed(blocks_of(0, 0, 0))  # no state stands there
    pressure.backed(blocks_of(9))
    pressure.relieve(0.0)
    assert driver.cache.match(blocks_of(0, 0, 0, 0, 9)).points[0].lacks
    assert not driver.cache.match(blocks_of(1, 9)).points[0].lacks


def test_a_run_looks_at_a_bounded_part_of_a_large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(blocks=1000, points=500)
    driver.fill((str(number), blocks_of(number, 7, tail=1)) for number in range(500))
    monkeypatch.setattr("ownerserve.cache.pressure.LOOK", 16)
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.1, high=0.2, idle_s=1.0, tier="host", spills=1000)
    [spill, *_] = pressure.relieve(100.0)
    assert isinstance(spill, Spill) and len(spill.points) == 16
    assert len(parts_of(driver.cache).evictor.next_points(16)) <= 32


def test_state_in_a_replay_is_no_snapshot() -> None:
    driver = Driver()
    driver.turn("1", blocks_of(1, 2, 3))
    resume = Replay(B, 3 * B)
    begun = driver.cache.begin(Turn(TurnId("2"), None, blocks_of(1, 2, 3, 4)), 0.0, resume=resume)
    assert isinstance(begun, Begun) and begun.write_floor == 3 * B
    driver.cache.reserve(TurnId("2"), 4 * B, 0.0)
    driver.cache.advance(TurnId("2"), blocks_of(2), 0.0)
    with pytest.raises(InvalidInput, match="snapshot from 48 on"):
        driver.cache.snapshot(TurnId("2"), 0.0)
    driver.cache.advance(TurnId("2"), blocks_of(3), 0.0)
    driver.cache.snapshot(TurnId("2"), 0.0)


def test_fragmentation_and_losses_are_reported() -> None:
    driver = Driver(points=2)
    driver.begin("1", blocks_of(1, 2, tail=4))
    driver.prefill("1")
    fragmentation = snapshot(driver.cache, 0.0).fragmentation
    padding = 3 * (100 - 90) * B
    assert fragmentation.internal_bytes["main"] == padding + (B - 4) * 90
    assert fragmentation.external_bytes == {"swa": 0, "overlap": 0}
    driver.finish("1")
    driver.evict(2)
    lost = snapshot(driver.cache, 0.0).counters.points_lost
    assert lost[LossCause.RANGE_EVICTED] == 1
    assert HYBRID.boundary_at_or_before(2 * B + 3) == 2 * B
