"""Who may read a block, and until when: what is lent is neither re-used nor written while its
ticket stands, and nothing is left of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import pytest

from ownerserve.cache.hetero import parts_of
from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import Begun, NoRoom
from ownerserve.cache.pools.slot_pools import SlotPool
from ownerserve.cache.pressure import Spill, Watermarks
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import TurnId
from tests.support.cache.cache_driver import DENSE, B, Driver, blocks_of
from tests.support.cache.readers import Readers

LONG_S = 1000.0


def running(driver: Driver, name: str, *symbols: int, upto: int) -> None:
    """A turn of these blocks, computed up to a position."""
    assert isinstance(driver.begin(name, blocks_of(*symbols, tail=1)), Begun)
    assert driver.prefill(name, upto=upto)


def reserved(driver: Driver, name: str) -> list[int]:
    """The turn has slots for all of its prompt; returns them."""
    turn_id = TurnId(name)
    assert not isinstance(
        driver.cache.reserve(turn_id, driver.live[turn_id].prompt_end, 0.0), NoRoom
    )
    return list(driver.cache.table(turn_id).range["kv"])


def taken_by_others(driver: Driver) -> set[int]:
    """Slots that others get when they take all that is free, and give back again."""
    blocks = parts_of(driver.cache).pools.blocks
    taken = blocks.take(blocks.free)
    blocks.give(taken)
    return set(taken)


ENDS: list[Callable[[Driver, str], object]] = [Driver.abort, Driver.finish]


@pytest.mark.parametrize("end", ENDS)
def test_private_blocks_wait_for_who_reads_them(end: Callable[[Driver, str], object]) -> None:
    """7 of 7 blocks that were being read were re-used after an abort, and 8 of 8 after a finish."""
    driver = Driver(DENSE, blocks=12)
    readers = Readers(driver)
    running(driver, "t", *range(8), upto=B - 3)
    row = reserved(driver, "t")
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    end(driver, "t")
    assert not taken_by_others(driver) & set(row), "a block that is being read"
    driver.check()
    assert snapshot(driver.cache, 0.0).pools["kv"].held == len(row)
    assert readers.read(ticket)
    readers.end(ticket)
    assert taken_by_others(driver) >= set(row)
    assert driver.cache.occupancy.blocks.free == 12
    assert not driver.cache.lends.read(ticket, 0.0)


def test_a_preempted_turn_that_sealed_leaves_what_its_reader_reads() -> None:
    driver = Driver(DENSE, blocks=10)
    readers = Readers(driver)
    ticket_at = 2 * B + 5
    running(driver, "t", *range(7), upto=ticket_at)
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    row = reserved(driver, "t")
    driver.abort("t")
    assert driver.evict(100) == 0, "its sealed path is locked"
    assert not taken_by_others(driver) & set(row)
    readers.look()
    readers.end(ticket)
    assert driver.evict(100) == 2
    assert driver.cache.occupancy.blocks.used == 0


def test_a_duplicate_seal_frees_nothing_under_a_reader() -> None:
    driver = Driver(DENSE, blocks=12)
    readers = Readers(driver)
    for name in ("first", "second"):  # both before either seals
        assert isinstance(driver.begin(name, blocks_of(1, 2, 3, tail=1)), Begun)
    spares = reserved(driver, "second")[:3]
    ticket = readers.lend_turn("second", idle_s=LONG_S)
    assert driver.prefill("first") and driver.prefill("second")
    assert driver.cache.counters.duplicate_blocks == 3
    assert not taken_by_others(driver) & set(spares)
    readers.look()
    driver.finish("first")
    driver.finish("second")
    readers.look()
    assert driver.evict(100) == 0, "the path it sealed to is lent as well"
    readers.end(ticket)
    driver.evict(100)
    assert driver.cache.occupancy.blocks.used == 0


def test_spares_are_no_part_of_the_last_row() -> None:
    driver = Driver(DENSE, blocks=14)
    readers = Readers(driver)
    for name in ("first", "second"):
        assert isinstance(driver.begin(name, blocks_of(1, 2, 3, tail=1)), Begun)
    reserved(driver, "second")
    ticket = readers.lend_turn("second", idle_s=LONG_S)
    assert driver.prefill("first") and driver.prefill("second")
    row = list(driver.cache.table(TurnId("second")).range["kv"])
    driver.abort("second")
    assert driver.cache.lends.places.blocks_of(ticket, 0, 9) == row and len(row) == 4


def test_two_readers_of_one_block_both_end_before_it_is_free() -> None:
    driver = Driver(DENSE, blocks=8)
    readers = Readers(driver)
    running(driver, "t", 1, 2, upto=B // 2)
    tickets = [readers.lend_turn("t", idle_s=LONG_S) for _ in range(2)]
    driver.abort("t")
    for ticket in tickets:
        assert driver.cache.occupancy.blocks.used > 0
        readers.end(ticket)
    assert driver.cache.occupancy.blocks.used == 0


def test_a_ticket_keeps_point_state_which_a_path_lock_does_not() -> None:
    driver = Driver(points=4)
    readers = Readers(driver)
    prompt = blocks_of(1, 2, tail=1)
    driver.turn("t", prompt)
    assert isinstance(driver.begin("u", prompt), Begun), "which locks the path"
    ticket = readers.lend(prompt, idle_s=LONG_S)
    for index in range(2):
        driver.cache.pressure.evict_points(index, 100)
    assert driver.restorable(prompt) == {2 * B}
    readers.look()
    readers.end(ticket)
    for index in range(2):
        driver.cache.pressure.evict_points(index, 100)
    assert driver.restorable(prompt) == set(), "the lock that is left keeps no point state"
    driver.check()


def test_a_ticket_follows_its_turn_and_holds_what_its_prompt_leaves() -> None:
    driver = Driver(blocks=24, points=8)
    readers = Readers(driver)
    prompt = blocks_of(1, 2, 3, tail=1)
    assert isinstance(driver.begin("t", prompt), Begun)
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    assert driver.prefill("t") and driver.decode("t", blocks_of(5, 6))
    readers.look()
    driver.finish("t")
    assert driver.evict(100) == 0
    for index in range(2):
        driver.cache.pressure.evict_points(index, 100)
    readers.look()
    assert 3 * B in driver.restorable(prompt), "where its prompt ends"
    readers.end(ticket)
    assert driver.evict(100) == 5


def test_a_fork_of_a_lent_turn_only_adds_a_lock() -> None:
    driver = Driver(DENSE, blocks=12)
    readers = Readers(driver)
    running(driver, "t", 1, 2, upto=2 * B + 1)
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    assert driver.fork("t", "child")
    own = driver.cache.table(TurnId("child")).range["kv"][2:]
    driver.abort("child")
    assert taken_by_others(driver) >= set(own), "the child's open block is nobody's but its own"
    driver.abort("t")
    readers.look()
    readers.end(ticket)
    assert driver.evict(100) == 2
    assert driver.cache.occupancy.blocks.used == 0


def test_a_turn_that_finds_no_room_takes_it_from_the_oldest_ticket() -> None:
    driver = Driver(DENSE, blocks=9)
    readers = Readers(driver)
    prompts = [blocks_of(number, 7, 8, tail=1) for number in range(2)]
    for number, prompt in enumerate(prompts):
        driver.turn(str(number), prompt)
    old, young = (readers.lend(prompt, idle_s=LONG_S) for prompt in prompts)
    running(driver, "t", 4, 5, 6, 4, upto=4 * B + 1)
    assert not readers.read(old), "its blocks were needed: what it read counts for nothing"
    assert readers.read(young)
    readers.look()


def test_no_ticket_ends_for_room_that_all_of_them_could_not_make() -> None:
    driver = Driver(DENSE, blocks=9)
    readers = Readers(driver)
    prompt = blocks_of(1, 7, tail=1)
    driver.turn("1", prompt)
    running(driver, "t", 2, 3, 4, 5, upto=4 * B + 1)
    ticket = readers.lend(prompt, idle_s=LONG_S)
    assert isinstance(driver.begin("u", blocks_of(6, 6, 6, 6, 6, 6, tail=1)), Begun)
    assert isinstance(driver.cache.reserve(TurnId("u"), 6 * B, 0.0), NoRoom)
    assert readers.read(ticket)
    assert not isinstance(driver.cache.reserve(TurnId("u"), 4 * B, 0.0), NoRoom)
    assert not readers.read(ticket)


def test_blocks_that_wait_for_a_reader_are_room_for_a_turn() -> None:
    driver = Driver(DENSE, blocks=8)
    readers = Readers(driver)
    running(driver, "t", *range(6), upto=3)
    reserved(driver, "t")
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    driver.abort("t")
    running(driver, "u", *range(10, 16), upto=6 * B + 1)
    assert not readers.read(ticket)


def test_a_fork_that_finds_no_room_takes_it_from_a_ticket() -> None:
    driver = Driver(DENSE, blocks=4)
    readers = Readers(driver)
    prompt = blocks_of(1, tail=1)
    driver.turn("1", prompt)
    ticket = readers.lend(prompt, idle_s=LONG_S)
    running(driver, "t", 2, 3, upto=2 * B + 1)
    assert driver.fork("t", "child")
    assert not readers.read(ticket)


def test_each_read_puts_a_tickets_end_off() -> None:
    driver = Driver(DENSE, blocks=8)
    readers = Readers(driver)
    prompt = blocks_of(1, 2, tail=1)
    driver.turn("1", prompt)
    ticket = readers.lend(prompt, idle_s=5.0)
    for _ in range(3):
        driver.now += 4.0
        assert readers.read(ticket)
    assert driver.evict(100) == 0
    driver.now += 5.0
    assert not readers.read(ticket), "5 s after its last read it is over"
    driver.turn("2", blocks_of(3))
    assert driver.evict(100) == 3
    readers.end(ticket)


def test_whose_time_is_over_goes_before_one_that_stands() -> None:
    driver = Driver(DENSE, blocks=8)
    readers = Readers(driver)
    prompts = [blocks_of(number, 7, 8, tail=1) for number in range(2)]
    for number, prompt in enumerate(prompts):
        driver.turn(str(number), prompt)
    assert isinstance(driver.begin("t", blocks_of(4, 5, 6, 4, tail=1)), Begun)
    old, young = (
        readers.lend(prompt, idle_s=idle_s)
        for prompt, idle_s in zip(prompts, (LONG_S, 1.0), strict=True)
    )
    driver.now = 2.0
    assert driver.prefill("t")
    assert readers.read(old) and not readers.read(young)


def test_a_spill_ends_for_a_turn_that_needs_its_room() -> None:
    driver = Driver(blocks=8, points=4)
    driver.turn("1", blocks_of(1, 2, 3, tail=1), session="a")
    pressure = driver.cache.pressure
    pressure.watermarks = Watermarks(low=0.9, high=1.0, idle_s=1.0, tier="host")
    [spill] = [one for one in pressure.relieve(100.0) if isinstance(one, Spill)]
    assert pressure.reads(spill.ticket, 100.0)
    driver.now = 100.0
    running(driver, "t", 4, 5, 6, 4, 5, 6, 7, upto=7 * B + 1)
    assert not pressure.reads(spill.ticket, 100.0), "its slots are somebody else's"
    pressure.spill_failed(spill.ticket)
    driver.check()


def test_a_ticket_says_where_what_it_covers_lies() -> None:
    driver = Driver(blocks=24, points=8)
    prompts = blocks_of(1, 2, 3, tail=1), blocks_of(1, 5, tail=1)
    for number, prompt in enumerate(prompts):
        driver.turn(str(number), prompt)
    lends = driver.cache.lends
    ticket = lends.lend(prompts, driver.now, idle_s=LONG_S)
    for prefix, prompt in enumerate(prompts):
        resident = driver.cache.residents.prefix(prompt)
        deep = resident.blocks
        slots = list(resident.range_slots(0, deep))
        assert lends.places.blocks_of(ticket, 0, deep, prefix=prefix) == slots
        assert lends.places.blocks_of(ticket, 1, deep, prefix=prefix) == slots[1:]
        assert lends.places.blocks_of(ticket, deep - 1, deep + 5, prefix=prefix) == slots[-1:]
        assert lends.places.points_of(ticket, prefix=prefix) == {deep: resident.point_slots(deep)}
    assert lends.places.blocks_of(ticket, 0, 1, prefix=2) == [] and not lends.places.points_of(
        ticket, prefix=2
    )
    lends.end(ticket)
    assert lends.places.blocks_of(ticket, 0, 1) == [] and not lends.places.points_of(ticket)


@pytest.mark.parametrize("end", ENDS)
def test_where_private_blocks_lie_is_known_after_their_turn(
    end: Callable[[Driver, str], object],
) -> None:
    driver = Driver(DENSE, blocks=12)
    readers = Readers(driver)
    running(driver, "t", 1, 2, 3, 4, upto=2 * B + 3)
    row = reserved(driver, "t")
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    assert driver.cache.lends.places.blocks_of(ticket, 1, 9) == row[1:]
    end(driver, "t")
    assert driver.cache.lends.places.blocks_of(ticket, 0, 9) == row
    assert driver.cache.lends.places.blocks_of(ticket, 3, 4) == row[3:4]


def test_a_ticket_stands_no_more_before_anything_of_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks on another thread after its read hears of the end before the block changes."""
    driver = Driver(blocks=24, points=8)
    readers = Readers(driver)
    assert isinstance(driver.begin("t", blocks_of(1, 2, tail=1)), Begun)
    ticket = readers.lend_turn("t", idle_s=LONG_S)
    assert driver.prefill("t", upto=B + 5)
    driver.abort("t")
    stood: list[bool] = []
    for owner, name in ((SlotPool, "give"), (PrefixTree, "unlock"), (PrefixTree, "cool")):
        before = getattr(owner, name)

        def spied(self: object, *given: object, call: Callable[..., object] = before) -> object:
            stood.append(driver.cache.lends.stands(ticket))
            return call(self, *given)

        monkeypatch.setattr(owner, name, spied)
    assert driver.cache.lends.stands(ticket)
    driver.cache.lends.end(ticket)
    assert len(stood) >= 2 and not any(stood)


def test_a_reader_on_another_thread_signs_nothing_that_changed() -> None:
    """It reads, asks, and signs; the cache's thread ends tickets and has others write there."""
    driver = Driver(DENSE, blocks=8)
    lends, memory = driver.cache.lends, driver.memory
    wrong: list[bytes] = []
    jobs: SimpleQueue[tuple[int, int, bytes] | None] = SimpleQueue()
    over: SimpleQueue[None] = SimpleQueue()

    def reader() -> None:
        while (job := jobs.get()) is not None:
            ticket, slot, expected = job
            while True:
                seen = memory["kv", slot]
                if not lends.stands(ticket):
                    break
                if seen != expected:
                    wrong.append(seen)
            over.put(None)

    thread = Thread(target=reader)
    thread.start()
    for number in range(200):
        prompt = blocks_of(number % 7, tail=1)
        driver.turn(f"{number}", prompt)
        ticket = lends.lend((prompt,), driver.now, idle_s=LONG_S)
        [slot] = lends.places.blocks_of(ticket, 0, 1)
        jobs.put((ticket, slot, memory["kv", slot]))
        lends.end(ticket)
        memory["kv", slot] = b"another's"
        over.get()
        driver.memory["kv", slot] = prompt[:64]
    jobs.put(None)
    thread.join()
    assert not wrong


def test_a_ticket_ends_by_the_clock_while_nothing_runs() -> None:
    driver = Driver(DENSE, blocks=8)
    prompt = blocks_of(1, 2, tail=1)
    driver.turn("1", prompt)
    lends = driver.cache.lends
    assert lends.next_due() is None
    ticket = lends.lend((prompt,), driver.now, idle_s=5.0)
    assert lends.next_due() == 5.0
    lends.read(ticket, 3.0)
    lends.expire(5.0)
    assert lends.stands(ticket) and lends.next_due() == 8.0
    lends.expire(8.0)
    assert not lends.stands(ticket) and lends.next_due() is None
    assert driver.evict(100) == 2


def test_only_a_running_turn_is_lent_as_a_turn() -> None:
    driver = Driver(DENSE, blocks=8)
    ticket = driver.cache.lends.lend((), 0.0, idle_s=1.0)
    with pytest.raises(InvalidInput, match="lend its prefix"):
        driver.cache.lends.follow(ticket, TurnId("t"))
