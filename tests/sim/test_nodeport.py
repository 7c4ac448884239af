"""A node's life on simulated media: put away, evicted, brought back; refused; crashed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import pack
from ownerserve.kv.units import GIB, MIB
from ownerserve.node.vocabulary.events import RestoreOutcome, TurnArrived, TurnGone
from ownerserve.plan.cost.prices import Coefficients, EstimateSource
from ownerserve.sim.storage.layout import slots_for, unit_model
from ownerserve.sim.storage.nodeport import make_node, unit_settings
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.media import duplex
from ownerserve.store.tiers.placement import OnEviction, Placement, WriteBack
from tests.support.sim.sim_node_driver import SimNodeDriver, U, disk, geometry_of, host, remote

LONG = 512


@pytest.fixture
def drivers() -> Iterator[list[SimNodeDriver]]:
    """Every driver in the list must be sound when its test is over."""
    made: list[SimNodeDriver] = []
    yield made
    for driver in made:
        driver.check()


def driver_of(drivers: list[SimNodeDriver], *tiers: object, **options: object) -> SimNodeDriver:
    driver = SimNodeDriver(tiers or (host(), disk()), **options)  # type: ignore[arg-type]
    drivers.append(driver)
    return driver


def test_an_idle_session_is_put_away_and_comes_back(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers)
    ids = driver.fresh(LONG)
    first = driver.turn("a", ids)
    assert first.report.outcome is RestoreOutcome.NOTHING_STORED and first.restored == 0
    driver.rest()
    spilled = driver.pcie.out.moved_bytes
    assert spilled == (LONG + 2) * parts_of(driver.cache).evictor.block_bytes
    assert driver.store.counters["kept_bytes"] == spilled
    driver.forget_device()
    second = driver.turn("a", ids + driver.fresh(8))
    assert second.report.outcome is RestoreOutcome.LOADED
    assert second.restored == LONG + 2 and second.report.loaded_bytes == spilled
    # host memory, then PCIe, each at 50 GB/s, and three looks at the catalogue
    expected_s = 2 * spilled / 50e9 + 3 * driver.store.lookup_s
    assert second.waited_s == pytest.approx(expected_s, rel=0.02)


def test_what_is_resident_starts_at_once(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    again = driver.turn("a", ids[:LONG])
    assert again.report.outcome is RestoreOutcome.RESIDENT and again.waited_s == 0.0
    assert again.restored == LONG - 1


def test_prices_are_those_of_the_media(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers, disk())
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    costs = driver.node.state.costs
    assert costs.sources()[Tier.DISK] is EstimateSource.DEFAULT
    driver.store.tiers[0].reads.slow(3.0)
    for _ in range(12):
        driver.rest()
        driver.forget_device()
        driver.turn("a", ids[:LONG])
    loaded = LONG * parts_of(driver.cache).evictor.block_bytes
    assert costs.sources()[Tier.DISK] is EstimateSource.MEASURED
    true_ms = 3.0 * loaded / 6e6 + loaded / 50e6
    assert costs.load(Tier.DISK, loaded).ms == pytest.approx(true_ms, rel=0.1)


def test_a_branch_of_a_model_with_windows_replays(drivers: list[SimNodeDriver]) -> None:
    """Point state stands at the turn's end; the branch has range state there, and no point."""
    driver = driver_of(drivers, config="deepseek-v4-flash")
    assert driver.block == 2, "units of 64, blocks of 128"
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    driver.forget_device()
    resumed = driver.turn("a", ids + driver.fresh(8))
    assert resumed.report.outcome is RestoreOutcome.LOADED
    assert resumed.restored == resumed.write_floor == (LONG + 2) // 2 * 2
    assert resumed.report.loaded_point_bytes == driver.model.state.point_bytes
    driver.forget_device()
    shared = LONG // 2 + 1
    branch = driver.turn("b", ids[:shared] + driver.fresh(40))
    assert branch.report.outcome is RestoreOutcome.LOADED
    assert branch.write_floor == shared // 2 * 2
    replayed = branch.write_floor - branch.restored
    assert replayed >= (driver.model.state.exact_replay_tokens or 0) > 0
    assert branch.report.loaded_point_bytes == 0


def test_a_write_budget_refuses_and_turns_compute(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers, disk(budget=(1.0, 200.0 * MIB)))
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    counts = driver.node.state.idle_spills.counts
    assert counts["not_kept"] > counts["kept"] > 0
    assert driver.store.wear.written_bytes <= 201 * MIB
    assert driver.store.tiers[0].counters["refused_write_budget"] == counts["not_kept"]
    driver.forget_device()
    assert driver.turn("a", ids[:LONG]).restored < LONG // 4


def test_a_crash_loses_host_memory_and_keeps_the_drive(drivers: list[SimNodeDriver]) -> None:
    memory, drive = host(), disk()
    driver = driver_of(drivers, memory, drive)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    assert memory.records == drive.records > 0
    driver.crash()
    assert memory.records == 0 and memory.used_bytes == 0 and drive.records > 0
    back = driver.turn("a", ids[:LONG])
    assert back.report.outcome is RestoreOutcome.LOADED and back.restored == LONG - 1
    assert back.waited_s > back.report.loaded_bytes / 6e9, "from the drive"
    assert memory.records == 0, "what was read once stays where it is"
    driver.forget_device()
    assert driver.turn("a", ids[:LONG]).restored == LONG - 1
    assert memory.records > 0, "what is read again is worth host memory"


def test_a_crash_in_the_middle_of_a_copy_leaves_nothing(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest(1.1)
    assert driver.node.state.is_busy
    driver.crash()
    driver.rest()
    assert driver.store.tiers[1].used_bytes == 0
    assert driver.turn("a", ids[:LONG]).report.outcome is RestoreOutcome.NOTHING_STORED


def test_a_remote_tier_is_one_for_all_workers(drivers: list[SimNodeDriver]) -> None:
    heap = Heap()
    shared = remote(heap)
    one = driver_of(drivers, host(), shared, heap=heap)
    two = driver_of(drivers, host(), shared, heap=heap)
    ids = one.fresh(LONG)
    one.turn("a", ids)
    one.rest()
    moved = two.turn("a", ids[:LONG])
    assert moved.report.outcome is RestoreOutcome.LOADED and moved.restored >= LONG - 32
    assert two.store.network_bytes == moved.report.loaded_bytes
    assert one.store.network_bytes >= moved.report.loaded_bytes


def test_a_cut_link_ends_in_computing(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers, disk())
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    driver.forget_device()
    driver.store.tiers[0].reads.cut(driver.heap.now + 3600.0)
    late = driver.turn("a", ids[:LONG])
    assert late.report.outcome is RestoreOutcome.LATE and late.restored == 0
    assert late.waited_s == pytest.approx(5.0)


def test_a_record_that_went_meanwhile_is_a_miss(
    drivers: list[SimNodeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(drivers)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    driver.forget_device()
    look = driver.store.find

    def look_then_lose(ids: Iterable[bytes]) -> dict[bytes, Tier]:
        found = look(ids)
        for tier in driver.store.tiers:
            tier.remove(next(iter(found), b""))
        return found

    monkeypatch.setattr(driver.store, "find", look_then_lose)
    missed = driver.turn("a", ids[:LONG])
    assert missed.report.outcome is RestoreOutcome.MISS and missed.report.misses
    assert missed.restored == 0


def test_a_turn_that_hangs_up_frees_what_was_reserved(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    driver.forget_device()
    turn_id = driver.arrive("a", ids[:LONG])
    driver.heap.run(driver.heap.now + 5 * driver.store.lookup_s)
    assert driver.cache.occupancy.blocks.used
    driver.node.handle(TurnGone(turn_id), driver.heap.now)
    assert driver.cache.occupancy.blocks.used == 0
    driver.rest()
    assert turn_id not in driver.started


def test_short_room_presses_sessions_out_first(drivers: list[SimNodeDriver]) -> None:
    driver = driver_of(drivers, hbm_bytes=8 * GIB)
    driver.cache.pressure.watermarks = Watermarks(low=0.3, high=0.5, tier="store")
    sessions = {name: driver.fresh(LONG) for name in ("a", "b", "c")}
    for name, ids in sessions.items():
        driver.turn(name, ids)
        driver.rest(0.2)
    driver.rest(20.0)
    assert driver.cache.occupancy.blocks.free >= 0.3 * driver.cache.occupancy.blocks.capacity
    assert driver.cache.counters.evictions
    back = driver.turn("a", sessions["a"][:LONG])
    assert back.report.outcome is RestoreOutcome.LOADED and back.restored == LONG - 1


def test_what_host_memory_gives_up_goes_down_if_it_is_nowhere_else(
    drivers: list[SimNodeDriver],
) -> None:
    memory, drive = host(6 * GIB), disk()
    driver = driver_of(drivers, memory, drive, placement=Placement(write=OnEviction()))
    sessions = {name: driver.fresh(LONG) for name in ("a", "b", "c")}
    for name, ids in sessions.items():
        driver.turn(name, ids)
        driver.rest()
    assert drive.records and driver.store.counters["demoted"] == drive.records
    assert memory.used_bytes <= 6 * GIB
    driver.forget_device()
    back = driver.turn("a", sessions["a"][:LONG])
    assert back.report.outcome is RestoreOutcome.LOADED


def test_what_is_written_back_is_on_the_drive_later(drivers: list[SimNodeDriver]) -> None:
    memory, drive = host(), disk()
    driver = driver_of(drivers, memory, drive, placement=Placement(write=WriteBack(1)))
    driver.turn("a", driver.fresh(LONG))
    driver.rest()
    assert memory.records == drive.records > 0


def test_without_a_store_a_turn_starts_with_what_the_device_has() -> None:
    driver = SimNodeDriver(())
    prompt = pack(driver.fresh(40))
    driver.node.handle(TurnArrived(TurnId("x"), SessionId("s"), prompt), 1.0)
    assert driver.started == {"x": 1.0} and driver.node.resume(prompt) is None
    assert driver.node.report(TurnId("x")) is None and not driver.node.stored_units(prompt)


def test_without_a_store_what_the_device_holds_is_told_and_short_room_is_evicted() -> None:
    driver = SimNodeDriver((), hbm_bytes=8 * GIB)
    cache = driver.cache
    cache.pressure.watermarks = Watermarks(low=0.3, high=0.5)
    blocks = cache.occupancy.blocks.capacity // 3
    for name in ("a", "b", "c"):
        driver.turn(name, driver.fresh(blocks * driver.block))
        driver.node.look(driver.heap.now)
    assert cache.occupancy.blocks.free >= 0.3 * cache.occupancy.blocks.capacity
    told = sum(word.tokens for word in driver.node.inventory)
    used = cache.occupancy.blocks.capacity - cache.occupancy.blocks.free
    assert 0 < told <= used * driver.block, "what went is told"
    driver.rest(1000.0)
    assert not driver.node.state.is_busy and not driver.pcie.out.moved_bytes
    driver.check()


def test_a_cache_of_another_model_is_refused() -> None:
    driver = SimNodeDriver((host(), disk()))
    other = SimNodeDriver((host(), disk()), config="llama-3.1-8b").model
    sizes = slots_for(other.layout, 8 * GIB, 8)
    cache = HeteroCache(other.layout, sizes.slots, sizes.state_slots)
    with pytest.raises(InvalidInput):
        make_node(cache, driver.model, Coefficients(1, 1, 0), store=driver.store, pcie=driver.pcie)


def test_the_grid_follows_the_block() -> None:
    driver = SimNodeDriver((host(), disk()))
    assert unit_settings(driver.model).record_blocks * U == 2048
    assert unit_settings(driver.model, record_blocks=4).record_blocks == 4
    assert duplex("x", driver.pcie.out.medium).out.free_s == 0.0


def test_three_tiers_all_have_a_copy_and_the_nearest_is_read(drivers: list[SimNodeDriver]) -> None:
    heap = Heap()
    memory, drive, shared = host(), disk(), remote(heap)
    driver = driver_of(drivers, memory, drive, shared, heap=heap)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    assert memory.records == drive.records == shared.records > 0
    assert drive.writes.moved_bytes == driver.store.wear.record_bytes
    driver.crash()
    driver.turn("a", ids[:LONG])
    assert drive.reads.moved_bytes and not shared.reads.moved_bytes


FAULTS = ("slow", "cut", "crash", "mend")


def play(seed: int, config: str) -> SimNodeDriver:
    """Sessions that go on, branch and idle over a worker too small for them, with faults."""
    draw, model = random.Random(seed), unit_model(geometry_of(config), U)
    unit = round(model.state.range_bytes_per_token)
    points = 40 * model.state.point_bytes
    hbm_bytes = 9 * model.layout.state_bytes + 900 * unit + points
    driver = SimNodeDriver(
        (host(300 * unit + points), disk(800 * unit + 2 * points)),
        config=config,
        hbm_bytes=hbm_bytes,
    )
    sessions = {name: driver.fresh(draw.randint(20, 200)) for name in "abcdef"}
    for step in range(45):
        name = draw.choice("abcdef")
        ids = sessions[name]
        if draw.random() < 0.15 and len(ids) > 40:
            other = draw.choice("abcdef")
            sessions[other] = ids = ids[: draw.randint(20, len(ids))]
            name = other
        ids += driver.fresh(draw.randint(1, 12))
        ran = driver.turn(name, ids, draw.randint(1, 4))
        assert 0 <= ran.restored <= ran.write_floor < len(ids)
        driver.rest(draw.choice((0.05, 0.5, 3.0, 40.0)))
        if step % 9 == 8:
            inflict(driver, draw.choice(FAULTS))
        driver.check()
    driver.rest(400.0)
    driver.check()
    assert not driver.node.state.is_busy and not len(driver.node.state.restores)
    return driver


def inflict(driver: SimNodeDriver, fault: str) -> None:
    drive = driver.store.tiers[1]
    match fault:
        case "slow":
            drive.reads.slow(20.0)
        case "cut":
            drive.writes.cut(driver.heap.now + 8.0)
        case "crash":
            driver.crash()
        case "mend":
            drive.reads.slow(1.0)


@pytest.mark.parametrize("config", ["qwen3-30b-a3b", "deepseek-v4-flash"])
@pytest.mark.parametrize("seed", [1])
def test_whatever_happens_turns_start_and_the_books_agree(seed: int, config: str) -> None:
    one, two = play(seed, config), play(seed, config)
    assert one.store.counters == two.store.counters, "invariant 8"
    assert one.store.wear == two.store.wear and one.heap.events == two.heap.events
    assert one.store.tiers[0].counters["evicted"] and one.store.counters["hit_disk"]
