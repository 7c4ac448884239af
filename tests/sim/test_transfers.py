"""State from device to device: room first, then both NICs, then it can be matched; or why not."""

from __future__ import annotations

import pytest

from ownerserve.kv.prefix import pack
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.engine.sequence import SimSequence, sequence_of
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import linked
from ownerserve.sim.worker.host import Host
from ownerserve.sim.worker.transfers import TransferOutcome, TransferResult, Transfers
from ownerserve.sim.worker.worker import Machine, SimWorker
from tests.support.sim.engine_driver import U, bare_node, make_engine, own_ids, turn

MS = 0.001


class Pair:
    """Two workers and what came of transfers between them. A NIC moves 64 bytes (a unit) a ms,
    with 1 ms of latency."""

    def __init__(self, *, blocks: int = 100, timeout_s: float = 1.0) -> None:
        self.heap = Heap()
        self.transfers = Transfers(self.heap, timeout_s=timeout_s)
        self.heard: list[tuple[float, TransferResult]] = []
        self.workers = [self._worker(index, blocks) for index in range(2)]

    def _worker(self, index: int, blocks: int) -> SimWorker:
        def machine(worker: SimWorker) -> Machine:
            engine = make_engine(blocks=blocks)
            return Machine(engine.cache, engine, bare_node(engine.cache, worker))

        nic = linked(f"nic{index}", Medium(1.0, 64.0), self.heap)
        return SimWorker(index, self.heap, machine, host=Host(nic), unit_tokens=U, listener=self)

    def began(self, sequence: SimSequence, now: float) -> None: ...

    def served(self, sequence: SimSequence, now: float) -> None:
        self.transfers.room_at(self.workers[1], now)

    def lost(self, sequence: SimSequence, now: float) -> None: ...

    def compute(self, where: int, number: int, tokens: int, output: int = 1) -> None:
        sequence = sequence_of(turn(number, own_ids(number), tokens, output), U)
        self.workers[where].submit(sequence, self.heap.now)

    def bring(self, number: int, units: int) -> None:
        def then(brought: TransferResult, now: float) -> None:
            self.heard.append((now, brought))

        source, target = self.workers
        prompt = pack(own_ids(number)[:units])
        self.transfers.bring(source, target, prompt, then=then, now=self.heap.now)

    def held(self, number: int, units: int) -> int:
        return self.workers[1].resident_units(pack(own_ids(number)[:units]))

    def check(self) -> None:
        for worker in self.workers:
            worker.check()


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.compute(0, 1, 40)
    made.heap.run()
    made.heap.now = 1.0
    return made


def test_what_lands_can_be_matched_when_all_of_it_is_there(pair: Pair) -> None:
    pair.bring(1, 10)  # 9 whole units could be gone on from: the last one is computed anew
    pair.heap.run(until_s=1.0099)
    assert pair.held(1, 10) == 0
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert when_s == pytest.approx(1.0 + 9 * MS + 1 * MS)
    assert brought == TransferResult(TransferOutcome.LANDED, 9, 9 * 64, 0.0)
    assert pair.held(1, 10) == 9
    pair.check()


def test_only_what_is_missing_is_sent_and_nothing_twice(pair: Pair) -> None:
    pair.compute(1, 1, 20)  # 5 units there
    pair.heap.run()
    pair.bring(1, 10)
    pair.heap.run()
    assert pair.heard[0][1].bytes == 4 * 64
    pair.bring(1, 10)
    pair.heap.run()
    assert pair.heard[1][1].landing is TransferOutcome.NOTHING_TO_BRING
    assert pair.transfers.count == 1 and pair.transfers.bytes == 4 * 64


def test_two_share_a_nic_fairly(pair: Pair) -> None:
    """9 units each at half the rate: both are there when all 18 have gone over it."""
    pair.compute(0, 2, 40)
    pair.heap.run()
    start_s = pair.heap.now
    pair.bring(1, 10)
    pair.bring(2, 10)
    pair.heap.run()
    assert [when_s - start_s for when_s, _ in pair.heard] == pytest.approx([19 * MS, 19 * MS])


def test_without_room_it_waits_for_a_turn_to_end() -> None:
    pair = Pair(blocks=112)
    pair.compute(0, 1, 40)
    pair.compute(1, 2, 416, 17)  # 104 of 112 blocks, 108 at its end
    pair.heap.run(until_s=0.5)
    pair.bring(1, 10)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LANDED and pair.held(1, 10) == 9
    assert brought.waited_s > 0.1  # its 16 decodes of 11 ms
    pair.check()


def test_what_finds_no_room_in_time_is_given_up() -> None:
    pair = Pair(blocks=112, timeout_s=0.05)
    pair.compute(0, 1, 40)
    pair.compute(1, 2, 416, 17)
    pair.heap.run(until_s=0.5)
    asked_s = pair.heap.now
    pair.bring(1, 10)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.NO_ROOM and not pair.held(1, 10)
    assert when_s == pytest.approx(asked_s + 0.05)
    pair.check()


def test_a_cut_link_makes_it_late_and_its_room_is_free_again(pair: Pair) -> None:
    pair.workers[1].host.nic.back.cut(5.0)
    free = pair.workers[1].cache.occupancy.blocks.free
    pair.bring(1, 10)
    assert pair.workers[1].cache.occupancy.blocks.free == free - 9
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LATE and when_s == pytest.approx(2.0)
    assert pair.workers[1].cache.occupancy.blocks.free == free
    pair.check()


def test_what_is_late_was_sent_in_part_and_leaves_the_link_to_others() -> None:
    pair = Pair(timeout_s=5 * MS)
    pair.compute(0, 1, 40)
    pair.heap.run()
    pair.bring(1, 10)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert (brought.landing, brought.bytes) == (TransferOutcome.LATE, 5 * 64)
    assert pair.transfers.bytes == pair.workers[0].host.nic.out.moved_bytes == 5 * 64
    assert not pair.workers[1].host.nic.back.streams
    pair.check()


@pytest.mark.parametrize(
    ("dead", "landing"), [(0, TransferOutcome.SOURCE_LOST), (1, TransferOutcome.LOST)]
)
def test_a_death_on_the_way(pair: Pair, dead: int, landing: TransferOutcome) -> None:
    pair.bring(1, 10)
    pair.heap.at(1.005, pair.workers[dead].crash)
    pair.heap.at(1.006, lambda now: pair.workers[dead].rise())
    pair.heap.run()
    assert [brought.landing for _, brought in pair.heard] == [landing]
    assert pair.held(1, 10) == 0 and not sum(pair.workers[1].cache.ingest.counts())
    pair.check()


def test_nothing_is_brought_to_one_that_is_down(pair: Pair) -> None:
    pair.workers[1].crash(1.0)
    pair.bring(1, 10)
    assert pair.heard == []  # told later, never from within `bring`
    pair.heap.run()
    assert pair.heard[0][1].landing is TransferOutcome.LOST


def test_an_idle_engine_whose_queue_starved_goes_on_when_a_transfer_has_landed() -> None:
    pair = Pair(blocks=12)
    pair.compute(0, 1, 40)
    pair.heap.run()
    pair.bring(1, 10)  # 9 of 12 blocks
    pair.compute(1, 2, 40)  # needs 10: they can be evicted once the transfer has landed
    pair.heap.run()
    worker = pair.workers[1]
    assert not worker.machine.engine.everyone() and pair.held(2, 10) == 10
    assert worker.machine.engine.counts.prefill_tokens == 40


def test_what_is_in_host_memory_is_sent_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    source, target = (worker.machine.node for worker in pair.workers)
    monkeypatch.setattr(source, "stored_units", lambda prompt: 6)
    pair.bring(1, 10)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert (brought.landing, brought.units) == (TransferOutcome.LANDED, 6)
    assert pair.held(1, 10) == 6
    monkeypatch.setattr(target, "stored_units", lambda prompt: 6)
    pair.bring(2, 10)
    pair.heap.run()
    assert pair.heard[-1][1].landing is TransferOutcome.NOTHING_TO_BRING, (
        "it brings its own back itself"
    )
