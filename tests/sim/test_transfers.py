"""State from device to device: production's lends and control over modelled links. What lands can
be matched when all of it is there; what does not says why, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ownerserve.cache.layout import Layout
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from ownerserve.node.transfers import peers
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.sim.engine.sequence import SimSequence, sequence_of
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import linked
from ownerserve.sim.transfer import transfers
from ownerserve.sim.transfer.network import PeerNetwork
from ownerserve.sim.transfer.outcomes import TransferOutcome, TransferResult
from ownerserve.sim.transfer.transfers import Transfers
from ownerserve.sim.worker.host import Host
from ownerserve.sim.worker.worker import Machine, SimWorker
from ownerserve.transfer.control.source import IDLE_S
from ownerserve.transfer.control.target import LEND_S
from tests.support.sim.engine_driver import (
    HYBRID,
    PLAIN,
    U,
    bare_node,
    make_engine,
    own_ids,
    turn,
)

MS = 0.001
ASKED_S = 6 * MS
"""A look, a Lend and a More, there and back, before the first byte."""
DEAR = Coefficients(500.0, 10.0, 0.0)
CHEAP = Coefficients(10.0, 1.0, 0.0)


class Pair:
    """Two workers and what came of transfers between them. A NIC moves 64 bytes (a unit) a ms,
    with 1 ms of latency."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        timeout_s: float = 1.0,
        prefill: Coefficients = DEAR,
        layout: Layout = PLAIN,
        piece_bytes: int = 1 << 30,
    ) -> None:
        self.heap = Heap()
        network = PeerNetwork(self.heap, piece_bytes=piece_bytes)
        self.transfers = Transfers(network, timeout_s=timeout_s)
        self.heard: list[tuple[float, TransferResult]] = []
        self.computed_s: dict[TurnId, float] = {}
        self._apart: dict[TurnId, SimSequence] = {}
        self._prefill = prefill
        self._layout = layout
        self.workers = [self._worker(index, blocks) for index in range(2)]

    def _worker(self, index: int, blocks: int) -> SimWorker:
        def machine(worker: SimWorker) -> Machine:
            engine = make_engine(blocks=blocks, layout=self._layout)
            return Machine(
                engine.cache, engine, bare_node(engine.cache, worker, prefill=self._prefill)
            )

        nic = linked(f"nic{index}", Medium(1.0, 64.0), self.heap)
        return SimWorker(index, self.heap, machine, host=Host(nic), unit_tokens=U, listener=self)

    def began(self, sequence: SimSequence, now: float) -> None: ...

    def served(self, sequence: SimSequence, now: float) -> None:
        self.computed_s[sequence.turn_id] = now
        if self._apart.pop(sequence.turn_id, None) is not None:
            source, target = self.workers
            self.transfers.send(source, target, sequence, then=self._heard, now=now)
        self.transfers.room_at(self.workers[1], now)

    def lost(self, sequence: SimSequence, now: float) -> None:
        self.transfers.call_off(sequence.turn_id, now)

    def compute(self, where: int, number: int, tokens: int, output: int = 1) -> SimSequence:
        sequence = sequence_of(turn(number, own_ids(number), tokens, output), U)
        self.workers[where].submit(sequence, self.heap.now)
        return sequence

    def compute_apart(self, number: int, tokens: int) -> SimSequence:
        """A prompt that the first computes for the second."""
        source, target = self.workers
        sequence = self.compute(0, number, tokens)
        self._apart[sequence.turn_id] = sequence
        self.transfers.follow(source, target, sequence, self.heap.now)
        return sequence

    def bring(self, number: int, units: int) -> None:
        source, target = self.workers
        prompt = pack(own_ids(number)[:units])
        self.transfers.bring(source, target, prompt, then=self._heard, now=self.heap.now)

    def _heard(self, brought: TransferResult, now: float) -> None:
        self.heard.append((now, brought))

    def held(self, number: int, units: int) -> int:
        return self.workers[1].resident_units(pack(own_ids(number)[:units]))

    def check(self) -> None:
        for worker in self.workers:
            worker.check()
        self.transfers.check()

    def check_nothing_is_left(self) -> None:
        """When all is over no ticket stands, and no room is held."""
        self.check()
        for worker in self.workers:
            assert not len(worker.cache.lends) and not len(worker.cache.ingest)


def with_prompt(**settings: object) -> Pair:
    made = Pair(**settings)  # type: ignore[arg-type]
    made.compute(0, 1, 40)
    made.heap.run()
    made.heap.now = 1.0
    return made


@pytest.fixture
def pair() -> Pair:
    return with_prompt()


def at(pair: Pair, when_s: float, call: Callable[[], object]) -> None:
    def happens(now: float) -> None:
        call()

    pair.heap.at(when_s, happens)


def test_what_lands_can_be_matched_when_all_of_it_is_there(pair: Pair) -> None:
    pair.bring(1, 10)  # 9 whole units could be gone on from: the last one is computed anew
    pair.heap.run(until_s=1.0159)
    assert pair.held(1, 10) == 0
    assert len(pair.workers[0].cache.lends) == 1, "the source keeps it while it is read"
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert when_s == pytest.approx(1.0 + ASKED_S + 9 * MS + 1 * MS)
    assert brought == TransferResult(TransferOutcome.LANDED, 9, 9 * 64, 0.0)
    assert pair.held(1, 10) == 9
    pair.check_nothing_is_left()


def test_point_state_comes_with_its_range() -> None:
    pair = with_prompt(layout=HYBRID)
    pair.bring(1, 10)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert brought == TransferResult(TransferOutcome.LANDED, 8, 8 * 32 + 1024, 0.0)
    [point] = pair.workers[1].cache.match(pack(own_ids(1)[:10])).points
    assert point.position == 8 and not point.lacks
    pair.check_nothing_is_left()


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
    both_s = ASKED_S + 19 * MS
    assert [when_s - start_s for when_s, _ in pair.heard] == pytest.approx([both_s, both_s])


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
    pair.check_nothing_is_left()


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
    pair.check_nothing_is_left()


def test_a_cut_link_says_nothing_and_the_peer_is_waited_for_as_control_does(pair: Pair) -> None:
    pair.workers[1].host.nic.back.cut(5.0)
    free = pair.workers[1].cache.occupancy.blocks.free
    pair.bring(1, 10)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LATE and when_s == pytest.approx(1.0 + LEND_S)
    assert pair.workers[1].cache.occupancy.blocks.free == free
    pair.check_nothing_is_left()


def test_what_is_late_was_sent_in_part_and_leaves_the_link_to_others() -> None:
    pair = with_prompt(timeout_s=ASKED_S + 5 * MS)
    pair.bring(1, 10)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert (brought.landing, brought.bytes) == (TransferOutcome.LATE, 5 * 64)
    assert pair.transfers.bytes == pair.workers[0].host.nic.out.moved_bytes == 5 * 64
    assert not pair.workers[1].host.nic.back.streams
    pair.check_nothing_is_left()


def test_a_bring_that_computing_would_beat_is_given_up() -> None:
    """The timeout is a second; computing takes 19 ms, of which no byte is there."""
    pair = with_prompt(prefill=CHEAP)
    pair.workers[0].host.nic.out.slow(4.0)  # 36 ms, and messages of 4 ms one way
    pair.bring(1, 10)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    looked_s = 5 * MS
    assert brought.landing is TransferOutcome.LATE
    assert when_s == pytest.approx(1.0 + looked_s + 19 * MS)
    pair.check_nothing_is_left()


def test_small_pieces_are_as_fast_as_large_ones() -> None:
    """Many are under way at once; the last byte is there at the same instant."""
    pair = with_prompt(piece_bytes=64)
    pair.bring(1, 10)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LANDED and brought.bytes == 9 * 64
    assert when_s == pytest.approx(1.0 + ASKED_S + 10 * MS)


# -- the source ------------------------------------------------------------------------------------


def test_a_lend_is_opened_between_two_steps_of_the_source(pair: Pair) -> None:
    """The source computes for 74 ms: until then it says neither what it has nor lends it."""
    pair.compute(0, 2, 64)
    pair.bring(1, 10)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LANDED
    answered_s = pair.computed_s[TurnId("t2")] + 1 * MS
    assert when_s == pytest.approx(answered_s + 4 * MS + 10 * MS)


def test_a_turn_at_the_source_takes_the_room_of_a_lend_and_the_reader_computes() -> None:
    pair = with_prompt(blocks=20)
    pair.bring(1, 10)
    at(pair, 1.010, lambda: pair.compute(0, 2, 76))  # 19 of 20 blocks; 10 of them are lent
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert brought.landing is TransferOutcome.GONE and not pair.held(1, 10)
    assert brought.bytes == 9 * 64, "what was read under a ticket that was over crossed the link"
    assert TurnId("t2") in pair.computed_s and pair.computed_s[TurnId("t2")] < 1.2
    pair.check_nothing_is_left()


def test_the_oldest_lend_yields_first() -> None:
    pair = Pair(blocks=33)
    for number in (1, 2):
        pair.compute(0, number, 40)
        pair.heap.run()
    pair.heap.now = 1.0
    pair.bring(1, 10)
    at(pair, 1.001, lambda: pair.bring(2, 10))
    at(pair, 1.010, lambda: pair.compute(0, 3, 84))  # 15 can be had; its first step takes 16
    pair.heap.run()
    landings = sorted((brought.landing for _, brought in pair.heard), key=str)
    assert landings == [TransferOutcome.GONE, TransferOutcome.LANDED]
    assert not pair.held(1, 10) and pair.held(2, 10) == 9
    pair.check_nothing_is_left()


def test_what_goes_between_look_and_lend_is_refused(pair: Pair) -> None:
    cache = pair.workers[0].cache
    pair.bring(1, 10)
    at(pair, 1.0015, lambda: cache.pressure.evict_blocks(cache.occupancy.evictable_blocks()))
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert (brought.landing, brought.bytes) == (TransferOutcome.GONE, 0)
    pair.check_nothing_is_left()


@pytest.mark.parametrize(
    ("dead", "landing"), [(0, TransferOutcome.SOURCE_LOST), (1, TransferOutcome.LOST)]
)
def test_a_death_on_the_way_is_known_at_once(
    pair: Pair, dead: int, landing: TransferOutcome
) -> None:
    pair.bring(1, 10)
    pair.heap.at(1.010, pair.workers[dead].crash)
    pair.heap.at(1.011, lambda now: pair.workers[dead].rise())
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is landing and when_s == pytest.approx(1.010)
    assert brought.bytes == 4 * 64
    assert pair.held(1, 10) == 0
    pair.check_nothing_is_left()


def test_a_source_that_dies_before_it_lends_is_waited_for_as_one_that_is_silent(
    pair: Pair,
) -> None:
    pair.bring(1, 10)
    pair.heap.at(1.0005, pair.workers[0].crash)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.SOURCE_LOST
    assert when_s == pytest.approx(1.0 + LEND_S)
    pair.check_nothing_is_left()


def test_a_reader_that_dies_leaves_a_ticket_until_nobody_has_read_for_so_long(pair: Pair) -> None:
    pair.bring(1, 10)
    pair.heap.at(1.010, pair.workers[1].crash)
    pair.heap.run(until_s=1.1)
    assert len(pair.workers[0].cache.lends) == 1
    pair.heap.run(until_s=1.02 + IDLE_S)
    pair.check_nothing_is_left()


def test_a_reader_that_dies_before_it_reads_leaves_a_ticket_no_longer(pair: Pair) -> None:
    """Whatever the lender remembers of one that it lent before."""
    pair.bring(1, 10)
    pair.compute(0, 2, 40)
    pair.heap.run(until_s=1.0 + 2 * IDLE_S)
    assert len(pair.heard) == 1
    start_s = pair.heap.now = 20.0
    pair.bring(2, 10)
    at(pair, start_s + 1.5 * MS, lambda: pair.compute(0, 3, 40))  # the lend waits for its step
    pair.heap.at(start_s + 3.5 * MS, pair.workers[1].crash)
    pair.heap.run(until_s=start_s + 0.1)
    assert len(pair.workers[0].cache.lends) == 1
    pair.heap.run(until_s=start_s + 0.1 + IDLE_S)
    pair.check_nothing_is_left()


def test_nothing_is_brought_to_one_that_is_down(pair: Pair) -> None:
    pair.workers[1].crash(1.0)
    pair.bring(1, 10)
    assert pair.heard == []  # told later, never from within `bring`
    pair.heap.run()
    assert pair.heard[0][1].landing is TransferOutcome.LOST


def test_an_idle_engine_whose_queue_starved_goes_on_when_a_transfer_has_landed() -> None:
    pair = with_prompt(blocks=12)
    pair.bring(1, 10)  # 9 of 12 blocks
    at(pair, 1.003, lambda: pair.compute(1, 2, 40))  # needs 10: once it has landed they can go
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


# -- a prompt that is computed elsewhere -----------------------------------------------------------


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_prompt_is_sent_while_it_is_computed(layout: Layout) -> None:
    """Three steps of 16 units. The lend is opened behind the first: when the third ends, 32 are
    there, and 15 on their way."""
    pair = Pair(layout=layout)
    sequence = pair.compute_apart(3, 192)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    end = 47 if layout is PLAIN else 46
    assert (brought.landing, brought.units) == (TransferOutcome.LANDED, end)
    after_s = when_s - pair.computed_s[sequence.turn_id]
    at_once_s = ASKED_S + (brought.bytes / 64 + 1) * MS
    assert after_s < (0.5 if layout is PLAIN else 0.9) * at_once_s
    size = end * 64 if layout is PLAIN else end * 32 + 1024
    assert brought.bytes == size == pair.transfers.bytes
    assert pair.held(3, 48) == end
    pair.check_nothing_is_left()


def test_a_prompt_of_one_step_is_sent_behind_it(pair: Pair) -> None:
    sequence = pair.compute_apart(3, 40)
    pair.heap.run()
    [(when_s, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LANDED and brought.units == 9
    # It was asked for when its step began.
    took_s = when_s - pair.computed_s[sequence.turn_id]
    assert took_s == pytest.approx(3 * MS + 10 * MS)
    pair.check_nothing_is_left()


def test_a_prompt_that_is_given_up_while_it_is_read_leaves_nothing() -> None:
    pair = Pair()
    sequence = pair.compute_apart(3, 192)

    def give_up() -> None:
        pair.workers[0].give_up(sequence, pair.heap.now)
        told.append(pair.transfers.call_off(sequence.turn_id, pair.heap.now))

    told: list[int] = []
    at(pair, 0.165, give_up)  # the lend is opened behind the first step, at 0.074
    pair.heap.run()
    assert pair.heard == [] and 0 < pair.transfers.bytes < 47 * 64
    assert told == [pair.transfers.bytes]
    assert not pair.held(3, 48)
    pair.check_nothing_is_left()
    assert not pair.workers[0].cache.running


def test_a_prompt_whose_lend_was_revoked_is_asked_for_again_when_it_is_computed() -> None:
    pair = Pair()
    pair.compute_apart(3, 192)
    cache = pair.workers[0].cache

    def revoke() -> None:
        cache.lends.end(next(iter(cache.lends)).number)

    at(pair, 0.165, revoke)
    pair.heap.run()
    [(_, brought)] = pair.heard
    assert brought.landing is TransferOutcome.LANDED and pair.held(3, 48) == 47
    pair.check_nothing_is_left()


def test_a_worker_that_dies_while_it_computes_for_another_leaves_nothing() -> None:
    pair = Pair()
    pair.compute_apart(3, 192)
    pair.heap.at(0.165, pair.workers[0].crash)
    pair.heap.run()
    assert pair.heard == [] and not pair.held(3, 48)
    pair.check_nothing_is_left()


def test_what_a_peer_computes_may_take_as_long_as_in_production() -> None:
    assert transfers.ORDER_SHARE == peers.ORDER_SHARE
