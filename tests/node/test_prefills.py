"""A node computes a prompt for another one, which reads it step by step: real ports, movers and
caches on both sides, and an engine that computes when a test says so. With an engine of its own:
engines/hf/test_prefilling.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from threading import Event

import pytest

from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.framed import FramedClient
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Accepted,
    Cancel,
    EndPrefill,
    Prefill,
    Reject,
    RpcAnswer,
    decode_answer,
    encode,
    new_nonce,
)
from ownerserve.node.rpc.server import RpcClient
from ownerserve.node.transfers import turn_lends
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.prefills import (
    UNASKED_S,
    AfterRead,
    OrderedPrompt,
    Prefills,
    PrefillTimes,
)
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold
from ownerserve.node.vocabulary.events import PeerPrefix, PeerRecord, PrefillOrder
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, ReadOutcome, ReadPart, Want
from ownerserve.transfer.control.events import LendNotOpened, LendOpened, OpenLend
from ownerserve.transfer.control.messages import Lend, LendRefusal, ReaderRank
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.node.lending_nodes import (
    AGENT,
    LAYERS,
    NAMES,
    PROMPT,
    SECTIONS,
    B,
    Node,
    cells,
    wanted,
)
from tests.support.node.patience import be_patient
from tests.support.waits import until

BLOCKS = (len(PROMPT) - 1) // B


class SteppedEngine:
    """Computes prompts for others, some blocks whenever a test says so. Its calls are made on the
    node's thread."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.prompts: dict[TurnId, OrderedPrompt] = {}
        self.aborted: list[TurnId] = []
        self.watched: dict[TurnId, LayersTold] = {}
        self.refusal: WorkerRefusal | None = None
        self.wait_ms, self.token_ms = 0.0, 0.01
        self.prefills: Prefills = node.transfers.compute_for_others(
            node.cache, NAMES, self, layers=self
        )

    def begin_prefill(self, ordered: OrderedPrompt) -> TurnId | WorkerRefusal:
        if self.refusal is not None:
            return self.refusal
        turn_id = TurnId(f"prefill-{len(self.prompts)}.0")
        self.prompts[turn_id] = ordered
        return turn_id

    def abort_prefill(self, turn_id: TurnId) -> None:
        self.aborted.append(turn_id)
        if turn_id in self.node.cache.running:
            self.node.cache.abort(turn_id, 0.0)

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        self.watched[turn_id] = told

    def unwatch_layers(self, turn_id: TurnId) -> None:
        self.watched.pop(turn_id, None)

    def prefill_ms(self, tokens: int, known: int) -> PrefillTimes:
        return PrefillTimes(self.wait_ms, self.token_ms * tokens)

    @property
    def turn_id(self) -> TurnId:
        """The last turn that was begun."""
        return list(self.prompts)[-1]

    def begin(self) -> None:
        """The turn leaves the engine's queue."""

        def play() -> None:
            cache, tokens = self.node.cache, self.prompts[self.turn_id].prefix.tokens
            begun = cache.begin(Turn(self.turn_id, None, tokens), 0.0)
            assert isinstance(begun, Begun)
            assert not isinstance(cache.reserve(self.turn_id, BLOCKS * B, 0.0), NoRoom)
            self.prefills.began(self.turn_id, begun.restored)

        self.node.between(play).result()

    def step(self, first: int, end: int) -> None:
        """Blocks [first, end) are computed; with the last one the turn is over."""

        def play() -> None:
            cache, tokens = self.node.cache, self.prompts[self.turn_id].prefix.tokens
            cache.advance(self.turn_id, tokens[first * B * 4 : end * B * 4], 0.0)
            if end == BLOCKS:
                cache.snapshot(self.turn_id, 0.0)
                cache.finish(self.turn_id, 0.0)
            self.prefills.computed(self.turn_id, end * B)
            if end == BLOCKS:
                self.prefills.over(self.turn_id)

        self.node.between(play).result()

    def layers(self, count: int, *, end: int) -> None:
        """Amid a step that computes blocks up to `end`: so many layers are done."""
        done = LayerProgress(0, end * B, {"dense": count})
        self.node.between(lambda: self.watched[self.turn_id](done)).result()

    def preempt(self) -> None:
        """The turn gives its room to another, and waits."""
        self.node.between(lambda: self.node.cache.abort(self.turn_id, 0.0)).result()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def p() -> Iterator[SteppedEngine]:
    node = Node("p")
    yield SteppedEngine(node)
    node.close()


@pytest.fixture
def d() -> Iterator[Node]:
    node = Node("d")
    yield node
    node.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def ordered(worker: LenderAddress, *, prompt: list[int] = PROMPT, **other: object) -> PeerPrefix:
    order = PrefillOrder(worker, pack(prompt))
    return wanted(worker, prompt=prompt, order=order, **other)


def read_in(threads: ThreadPoolExecutor, d: Node, prefix: PeerPrefix) -> Future[ReadOutcome]:
    offered = d.transfers.peers.look(prefix)
    assert offered
    return threads.submit(d.transfers.peers.read, cells(prefix, offered))


def is_lent(p: SteppedEngine) -> None:
    until(lambda: len(p.node.cache.lends) > 0, within_s=60, what="the prompt is lent")


def assert_all(p: SteppedEngine, prefix: PeerPrefix, outcome: ReadOutcome, d: Node) -> None:
    assert isinstance(outcome, ReadHit), d.transfers.counts()
    offered = {part.meta.id: bytes(part.data) for part in outcome.parts}
    kinds = {prefix.records[id_] for id_ in offered}
    assert PeerRecord("swa", BLOCKS, BLOCKS) in kinds
    for id_, data in offered.items():
        assert data == p.node.bytes_of(prefix.records[id_])


def test_a_prompt_is_read_as_it_is_computed(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    reading = read_in(threads, d, prefix)
    p.begin()
    is_lent(p)
    p.step(0, 3)
    until(lambda: d.transfers.counts().read_bytes > 0, within_s=60, what="a part is read")
    assert not reading.done()
    p.step(3, 8)
    p.step(8, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)
    until(lambda: p.prefills.counts["read"] == 1, within_s=60, what="the prompt is given up")
    d.transfers.peers.call_off(prefix.turn_id)
    assert not p.aborted and not len(p.node.cache.lends)
    counts = d.transfers.counts()
    assert counts.orders == {"accepted": 1} and counts.ordered_bytes["early"] > 0


def test_a_layer_is_read_while_its_step_goes_on(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_lends, "PIECE_BYTES", 1)
    prefix = ordered(p.node.address)
    reading = read_in(threads, d, prefix)
    p.begin()
    is_lent(p)
    p.layers(1, end=5)
    until(lambda: d.transfers.counts().read_bytes > 0, within_s=60, what="a layer is read")
    p.layers(2, end=5)  # the last one comes with the step
    p.step(0, 5)
    for count in range(1, LAYERS + 1):
        p.layers(count, end=BLOCKS)
    p.step(5, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)
    layer = SECTIONS["dense"].unit_bytes // LAYERS
    told = p.node.transfers.counts().told_bytes
    assert told == {
        "layer": (5 * 2 + 5 * 3) * layer,
        "step": 5 * layer + SECTIONS["swa"].unit_bytes,
    }
    assert not p.watched


def test_layers_that_are_worth_no_piece_come_with_their_step(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    reading = read_in(threads, d, prefix)
    p.begin()
    is_lent(p)
    p.layers(LAYERS, end=BLOCKS)
    p.step(0, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)
    assert set(p.node.transfers.counts().told_bytes) == {"step"}


def test_what_a_step_told_is_the_turns_own_though_the_tree_has_anothers_by_its_end(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a layer told before and one told after would be of two computations."""
    monkeypatch.setattr(turn_lends, "PIECE_BYTES", 1)
    prefix = ordered(p.node.address)
    reading = read_in(threads, d, prefix)
    p.begin()
    is_lent(p)
    (ticket,) = p.node.cache.lends
    own = p.node.cache.lends.places.blocks_of(ticket.number, 0, BLOCKS)
    assert len(own) == BLOCKS
    p.layers(2, end=BLOCKS)
    p.node.turn(AGENT, PROMPT)  # into other blocks
    p.step(0, BLOCKS)
    outcome = reading.result(60)
    assert isinstance(outcome, ReadHit), d.transfers.counts()
    size, memory = SECTIONS["dense"].unit_bytes, p.node.memory["dense"]
    for part in outcome.parts:
        record = prefix.records[part.meta.id]
        if record.first < record.end:
            slots = own[record.first : record.end]
            assert bytes(part.data) == b"".join(memory[n * size : (n + 1) * size] for n in slots)


def test_on_one_host_a_prompt_is_read_by_address_as_it_is_computed(
    p: SteppedEngine, threads: ThreadPoolExecutor
) -> None:
    d = Node("d", roads=("readv",))
    try:
        prefix = ordered(p.node.address)
        reading = read_in(threads, d, prefix)
        p.begin()
        is_lent(p)
        p.step(0, 3)
        p.step(3, 8)
        p.step(8, BLOCKS)
        assert_all(p, prefix, reading.result(60), d)
    finally:
        d.close()


def expected_parts(d: Node, prefix: PeerPrefix) -> list[list[Want]]:
    """What a restore in parts reads: a cell each, the point with the last one."""
    [first, second, *rest] = cells(prefix, d.transfers.peers.look(prefix))
    parts = [[first], [second], rest]
    d.transfers.peers.expect(parts[0], prefix.turn_id, parts)
    return parts


def test_a_prompt_comes_part_by_part_to_one_reader(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    parts, ends = expected_parts(d, prefix), (4, 8, BLOCKS)
    read, before = list[ReadPart](), 0
    reading = threads.submit(d.transfers.peers.read, parts[0])
    p.begin()
    is_lent(p)
    for part, end in zip(parts, ends, strict=True):
        if end > 4:
            reading = threads.submit(d.transfers.peers.read, part)
        p.step(before, end)
        outcome, before = reading.result(20), end
        assert isinstance(outcome, ReadHit), "it is there as soon as it is computed"
        read += outcome.parts
    assert_all(p, prefix, ReadHit(tuple(read), "peer"), d)
    assert d.transfers.counts().brings == {"brought": 1}
    returned = {"returned": 1}
    until(lambda: p.node.transfers.counts().lends == returned, within_s=60, what="P has it back")


def test_between_two_parts_a_prompt_may_be_given_up(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    parts = expected_parts(d, prefix)
    reading = threads.submit(d.transfers.peers.read, parts[0])
    p.begin()
    is_lent(p)
    p.step(0, 4)
    assert isinstance(reading.result(60), ReadHit)
    d.transfers.peers.call_off(prefix.turn_id)
    until(lambda: p.aborted, within_s=60, what="P stops")
    until(lambda: not len(p.node.cache.lends), within_s=60, what="the lend is returned")
    assert d.transfers.counts().brings == {"stopped": 1}
    assert isinstance(d.transfers.peers.read(parts[1]), ReadMiss), "nobody brings it any more"


@pytest.mark.parametrize("goes", [0, 1])
@pytest.mark.parametrize("is_in_parts", [True, False])
def test_of_two_turns_with_one_prompt_the_one_that_stays_has_it_though_the_other_goes(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor, is_in_parts: bool, goes: int
) -> None:
    """Each has ordered it for itself; one read serves both, by the order of either."""
    peers, wants = d.transfers.peers, list[Want]()
    turns = [ordered(p.node.address, turn_id=TurnId(name)) for name in ("first", "second")]
    for prefix in turns:
        wants = cells(prefix, peers.look(prefix))
    if is_in_parts:
        wants, _ = (expected_parts(d, prefix)[0] for prefix in turns)
    gone, stays = list(p.prompts)[goes], turns[1 - goes]
    reading = threads.submit(peers.read, wants)
    peers.call_off(turns[goes].turn_id)
    until(lambda: p.aborted == [gone], within_s=60, what="that one's order is called off")
    del p.prompts[gone]
    p.begin()
    is_lent(p)
    p.step(0, BLOCKS)
    outcome = reading.result(60)
    assert isinstance(outcome, ReadHit), d.transfers.counts()
    assert len(outcome.parts) == len(wants)
    peers.call_off(stays.turn_id)


def test_a_read_that_is_given_up_is_not_gone_on_with_for_an_equal_prompt(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    """That one is read by itself: what one has ordered has one reader. It is expected just as the
    first one is stopped, before its thread has heard so."""
    peers, first, second = d.transfers.peers, TurnId("first"), TurnId("second")

    class Stopped(Counter[str]):
        def __setitem__(self, end: str, count: int) -> None:
            super().__setitem__(end, count)
            peers.call_off(first)
            peers.expect(wants, second, (wants,))

    wants = cells(prefix := ordered(p.node.address, turn_id=first), peers.look(prefix))
    peers.expect(wants, first, (wants,))
    reading = threads.submit(peers.read, wants)
    is_lent(p)
    peers.look(ordered(p.node.address, turn_id=second))
    peers.brings = Stopped()
    peers.give_up(wants)
    read = reading.result(20)
    assert isinstance(read, ReadMiss) and read.reason is MissReason.CANCELLED
    peers.brings = Counter()
    reading = threads.submit(peers.read, wants)
    p.begin()
    p.step(0, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)


def test_a_prompt_that_begins_as_anothers_comes_by_its_own_order(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    """Both begin with the same cells; the other is ordered later, and before the first is read."""
    peers = d.transfers.peers
    prefix = ordered(p.node.address, turn_id=TurnId("first"))
    wants = cells(prefix, peers.look(prefix))
    alike = [*PROMPT[: 8 * B], *range(900, 900 + 2 * B + 1)]
    other = ordered(p.node.address, prompt=alike, turn_id=TurnId("other"))
    assert {one.id for one in wants} & set(peers.look(other))
    peers.expect(wants, prefix.turn_id, (wants,))
    reading = threads.submit(peers.read, wants)
    is_lent(p)
    p.prompts.popitem()  # the engine comes to the first one
    p.begin()
    p.step(0, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)


def test_a_prompt_that_is_computed_already_is_read_as_well(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    offered = d.transfers.peers.look(prefix)
    p.begin()
    p.step(0, BLOCKS)
    assert_all(p, prefix, d.transfers.peers.read(cells(prefix, offered)), d)


def test_what_is_here_already_is_lent_and_not_computed_again(p: SteppedEngine, d: Node) -> None:
    first = ordered(p.node.address)
    assert d.transfers.peers.look(first)
    p.begin()
    p.step(0, BLOCKS)
    again = ordered(p.node.address, turn_id=TurnId("again"))
    offered = d.transfers.peers.look(again)
    assert len(p.prompts) == 1
    assert_all(p, again, d.transfers.peers.read(cells(again, offered)), d)


def test_a_turn_that_was_preempted_goes_on_and_nothing_is_read_twice(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    reading = read_in(threads, d, prefix)
    p.begin()
    is_lent(p)
    p.step(0, 4)
    p.preempt()
    p.begin()  # a point model begins anew: no point was kept
    p.step(0, 6)
    p.step(6, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)


def test_a_turn_that_was_preempted_before_it_was_lent_tells_only_what_it_has_computed_again(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    offered = d.transfers.peers.look(prefix)
    p.begin()
    p.step(0, 6)
    p.preempt()
    p.begin()  # anew: into other blocks
    reading = threads.submit(d.transfers.peers.read, cells(prefix, offered))
    is_lent(p)
    p.step(0, 3)
    until(lambda: d.transfers.counts().read_bytes > 0, within_s=60, what="a part is read")
    p.step(3, BLOCKS)
    assert_all(p, prefix, reading.result(60), d)


def test_who_is_not_waited_for_stops(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    prefix = ordered(p.node.address)
    offered = d.transfers.peers.look(prefix)
    wants = cells(prefix, offered)
    reading = threads.submit(d.transfers.peers.read, wants)
    p.begin()
    is_lent(p)
    p.step(0, 3)
    d.transfers.peers.give_up(wants)  # its client hung up
    outcome = reading.result(60)
    assert isinstance(outcome, ReadMiss) and outcome.reason is MissReason.CANCELLED
    until(lambda: p.aborted == [p.turn_id], within_s=60, what="the turn is aborted")
    assert p.prefills.counts["left"] == 1


def test_an_order_that_nobody_reads_is_called_off_or_ends_by_itself(
    p: SteppedEngine, d: Node
) -> None:
    first = ordered(p.node.address)
    assert d.transfers.peers.look(first)
    d.transfers.peers.call_off(first.turn_id)
    until(lambda: len(p.aborted) == 1, within_s=60, what="the order is called off")

    assert d.transfers.peers.look(ordered(p.node.address, turn_id=TurnId("other")))
    now = time.monotonic()
    p.node.between(lambda: p.prefills.poll(now)).result()
    assert len(p.aborted) == 1
    assert p.prefills.next_due() <= now + UNASKED_S
    p.node.between(lambda: p.prefills.poll(now + UNASKED_S)).result()
    assert len(p.aborted) == 2
    assert p.prefills.counts["unasked"] == p.prefills.counts["called_off"] == 1


def test_a_reader_hears_at_once_that_no_more_is_computed(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    def amid(turn: str) -> Future[ReadOutcome]:
        prefix = ordered(p.node.address, turn_id=TurnId(turn))
        reading = read_in(threads, d, prefix)
        p.begin()
        is_lent(p)
        p.step(0, 3)
        return reading

    reading = amid("given up by its engine")
    p.node.between(lambda: p.abort_prefill(p.turn_id)).result()
    p.node.between(lambda: p.prefills.over(p.turn_id)).result()
    assert isinstance(reading.result(60), ReadMiss)
    assert d.transfers.counts().brings == {"short": 1}
    until(lambda: not len(p.node.cache.lends), within_s=60, what="the lend's end")

    reading = amid("called off")
    p.node.between(lambda: p.prefills.answer(EndPrefill(p.turn_id))).result()
    assert isinstance(reading.result(60), ReadMiss)
    assert d.transfers.counts().brings == {"short": 2}


def test_an_order_whose_answer_came_too_late_is_called_off(p: SteppedEngine, d: Node) -> None:
    may_go = Event()
    p.node.between(may_go.wait)  # a long step
    late = ordered(p.node.address, compute_ms=1.0)
    assert not d.transfers.peers.look(late)
    may_go.set()
    behind = ordered(p.node.address, turn_id=TurnId("behind"))
    assert d.transfers.peers.look(behind)
    others = len(p.prompts) - 1  # 0: it was called off before it began
    until(lambda: len(p.aborted) == others, within_s=60, what="it is called off")
    assert d.transfers.counts().orders == {"refused": 1, "accepted": 1}
    d.transfers.peers.call_off(behind.turn_id)
    until(lambda: p.prefills.next_due() == inf, within_s=60, what="nothing is kept")


def test_a_look_that_comes_after_its_turn_was_given_up_orders_nothing(
    p: SteppedEngine, d: Node
) -> None:
    late = ordered(p.node.address)
    d.transfers.peers.call_off(late.turn_id)  # its client hung up while its own tiers were asked
    assert not d.transfers.peers.look(late)
    assert not p.prompts and not len(d.transfers.peers.orders)


def test_one_turn_has_one_order(p: SteppedEngine, d: Node) -> None:
    prefix = ordered(p.node.address)
    for _ in range(3):
        assert d.transfers.peers.look(prefix)
    assert len(p.prompts) == 1


def test_a_busy_a_late_and_a_silent_worker_cost_a_look(p: SteppedEngine, d: Node) -> None:
    p.refusal = WorkerRefusal.QUEUE_FULL
    assert not d.transfers.peers.look(ordered(p.node.address))
    p.refusal, p.wait_ms = None, 1e9
    assert not d.transfers.peers.look(ordered(p.node.address, turn_id=TurnId("second")))
    until(lambda: len(p.aborted) == 1, within_s=60, what="the late one is called off")
    # One that is slow itself is no reason: this one's own price may be a guess.
    p.wait_ms, p.token_ms = 0.0, 1e9
    assert d.transfers.peers.look(ordered(p.node.address, turn_id=TurnId("slow")))
    gone = LenderAddress(p.node.unit, "tcp://127.0.0.1:9")
    silent = ordered(gone, turn_id=TurnId("third"), compute_ms=1.0)
    assert not d.transfers.peers.look(silent)
    assert d.transfers.counts().orders == {"refused": 2, "late": 1, "accepted": 1}


def test_what_its_reader_has_is_not_reckoned_and_is_read_from_it(p: SteppedEngine, d: Node) -> None:
    p.wait_ms, p.token_ms = 0.0, 1e9
    d.transfers.peers.orders.own = d.address
    prefix = ordered(p.node.address, resident_tokens=BLOCKS * B)
    assert d.transfers.peers.look(prefix), "nothing is left to compute there"
    (asked,) = p.prompts.values()
    assert (asked.source, asked.lent_as) == (d.address, prefix.session_id)


def test_where_nobody_is_named_the_known_peer_with_the_least_to_do_is_asked(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    busy = Node("busy", pending_tokens=9000)
    try:
        d.transfers.peers.orders.known = ("tcp://127.0.0.1:9", busy.rpc.address, p.node.rpc.address)
        prefix = wanted(None, order=PrefillOrder(None, pack(PROMPT)))
        reading = read_in(threads, d, prefix)
        p.begin()
        is_lent(p)
        p.step(0, BLOCKS)
        assert_all(p, prefix, reading.result(60), d)
        d.transfers.peers.orders.known = ("tcp://127.0.0.1:9",)
        alone = wanted(None, order=PrefillOrder(None, pack(PROMPT)), turn_id=TurnId("alone"))
        assert not d.transfers.peers.look(alone)
    finally:
        busy.close()


def test_what_is_no_prompt_is_refused(p: SteppedEngine) -> None:
    client = RpcClient(p.node.rpc.address)
    try:
        for lie in (b"", b"\1\2\3", pack(range(B)), pack(range(2 * B))[:-1]):
            assert client.ask(Prefill(lie)) == Reject(WorkerRefusal.MALFORMED)
        accepted = client.ask(Prefill(pack(range(B + 1))))
        assert isinstance(accepted, Accepted) and accepted.tokens == B
        tip = prefix_of(range(B), B).tip
        assert accepted.tip == tip
    finally:
        client.close()


def test_only_what_the_prompt_is_cut_into_is_lent_and_to_one_reader(
    p: SteppedEngine, d: Node
) -> None:
    prefix = ordered(p.node.address)
    offered = d.transfers.peers.look(prefix)
    p.begin()
    reader = RoutingUnit(WorkerId("d"), 0, Incarnation(1))

    def opened(*ids: bytes, units: int = 1) -> LendOpened | LendNotOpened:
        pieces = tuple(FramePiece(id_, 0, units, 0, LAYERS) for id_ in ids)
        lend = Lend(new_nonce(), p.node.unit, pieces, (ReaderRank(0, 0, 0),), p.turn_id)
        asked = OpenLend(1, reader, lend, 1e6)
        hint, done = SessionHint(None, None, 0), list[LendOpened | LendNotOpened]()
        now = time.monotonic()
        p.node.between(lambda: done.append(p.node.lending.open(asked, hint, now))).result()
        return done[0]

    stray = next(id_ for id_ in prefix.records if id_ not in offered)
    good = next(id_ for id_, one in prefix.records.items() if one == PeerRecord("dense", 0, 4))
    assert opened(good, stray) == LendNotOpened(1, LendRefusal.NOT_HELD)
    assert opened(good, units=5) == LendNotOpened(1, LendRefusal.NOT_HELD)
    first = opened(good, units=4)
    assert isinstance(first, LendOpened) and not first.pieces and first.follows == p.turn_id
    assert opened(good) == LendNotOpened(1, LendRefusal.BUSY)
    p.node.between(lambda: p.node.lending.end(first.ticket)).result()
    assert p.aborted == [p.turn_id], "who read it has done with it"
    assert opened(good) == LendNotOpened(1, LendRefusal.NOT_HELD)


class Leg:
    """A gateway's leg to P, which asks for PROMPT under its number; `over`: how many tokens it was
    told that there are."""

    def __init__(self, p: SteppedEngine) -> None:
        self.number = new_nonce()
        self.over: list[int] = []
        self._p = p

    def begin(self, prompt: list[int] = PROMPT) -> RpcAnswer:
        asked = Prefill(pack(prompt), leg=self.number)
        assert self._p.node.transfers.legs is not None
        return self._p.node.transfers.legs.begin(asked, self.over.append).result(60)

    def order(self, **other: object) -> PeerPrefix:
        """What D asks for by that number."""
        worker = self._p.node.address
        return wanted(worker, order=PrefillOrder(worker, pack(PROMPT), leg=self.number), **other)

    def end(self) -> None:
        """The gateway hangs up."""
        assert self._p.node.transfers.legs is not None
        self._p.node.transfers.legs.end(self.number)


def test_a_leg_and_who_reads_its_prompt_are_told_of_one(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    leg = Leg(p)
    begun = leg.begin()
    assert isinstance(begun, Accepted)
    p.begin()
    p.step(0, 3)  # before anybody has asked to read it
    reading = read_in(threads, d, leg.order())
    is_lent(p)
    p.step(3, 8)
    assert not leg.over
    p.step(8, BLOCKS)
    assert_all(p, leg.order(), reading.result(60), d)
    until(lambda: p.prefills.counts["read"] == 1, within_s=60, what="the prompt is given up")
    assert leg.over == [BLOCKS * B]
    assert (len(p.prompts), p.prefills.counts["joined"]) == (1, 1)
    leg.end()
    p.node.between(lambda: None).result()
    assert p.prefills.counts["called_off"] == 0, "it was over"


def test_a_leg_that_comes_behind_its_reader_joins_and_ends_with_it(
    p: SteppedEngine, d: Node, threads: ThreadPoolExecutor
) -> None:
    leg = Leg(p)
    reading = read_in(threads, d, leg.order())
    assert isinstance(leg.begin(), Accepted)
    p.begin()
    is_lent(p)
    p.step(0, 3)
    leg.end()  # its client hung up: D will too
    assert isinstance(reading.result(60), ReadMiss)
    until(lambda: p.aborted == [p.turn_id], within_s=60, what="the turn is aborted")
    assert leg.over == [3 * B]
    assert (len(p.prompts), p.prefills.counts["called_off"]) == (1, 1)


def test_who_reads_is_told_of_a_leg_s_prompt_while_a_step_computes_it(
    p: SteppedEngine, d: Node
) -> None:
    leg, is_over = Leg(p), Event()
    leg.begin()
    p.node.between(is_over.wait)  # a long step
    try:
        assert d.transfers.peers.look(leg.order(compute_ms=1.0))
    finally:
        is_over.set()
    assert d.transfers.counts().orders == {"accepted": 1}


def test_another_prompt_under_a_leg_s_number_is_another_one(p: SteppedEngine) -> None:
    leg = Leg(p)
    assert isinstance(leg.begin(), Accepted)
    assert isinstance(leg.begin([*PROMPT[:-1], 3, 4]), Accepted)
    assert len(p.prompts) == 1, "of the same blocks"
    assert isinstance(leg.begin([9, *PROMPT[1:]]), Accepted)
    assert len(p.prompts) == 2


def test_a_leg_of_what_is_here_is_over_at_once_and_one_that_is_refused_never_begins(
    p: SteppedEngine,
) -> None:
    leg, again, busy = Leg(p), Leg(p), Leg(p)
    leg.begin()
    p.begin()
    p.step(0, BLOCKS)
    assert leg.over == [BLOCKS * B]
    again.begin()
    assert (again.over, len(p.prompts)) == ([BLOCKS * B], 1)
    p.refusal = WorkerRefusal.QUEUE_FULL
    assert busy.begin([9, *PROMPT]) == Reject(WorkerRefusal.QUEUE_FULL)
    busy.end()
    assert not busy.over


@pytest.mark.parametrize("after_read", AfterRead)
def test_what_was_computed_for_another_goes_first_or_at_once(
    after_read: AfterRead, d: Node, threads: ThreadPoolExecutor
) -> None:
    node = Node("p", place=TransferPlace(after_read=after_read))
    p = SteppedEngine(node)
    try:
        own = [5, *PROMPT[1:]]
        node.turn(SessionId("b" * 32), own)
        node.between(lambda: node.cache.sessions.expire(1e9)).result()  # nobody's by now
        free = node.cache.occupancy.blocks.free
        prefix = ordered(p.node.address)
        reading = read_in(threads, d, prefix)
        p.begin()
        is_lent(p)
        p.step(0, BLOCKS)
        assert isinstance(reading.result(60), ReadHit)
        until(lambda: p.prefills.counts["read"] == 1, within_s=60, what="the prompt is given up")
        node.between(lambda: None).result()
        kept = free - node.cache.occupancy.blocks.free
        assert kept == (BLOCKS if after_read is AfterRead.KEEP else 0)

        def evict() -> tuple[int, int]:
            node.cache.pressure.evict_blocks(kept)
            both = (prefix_of(tokens, B).tokens for tokens in (PROMPT, own))
            first, other = (node.cache.match(tokens).range_tokens // B for tokens in both)
            return first, other

        assert node.between(evict).result() == (0, BLOCKS)
    finally:
        node.close()


def test_asked_again_under_its_nonce_it_is_one_prompt(p: SteppedEngine) -> None:
    client = FramedClient(p.node.rpc.address, timeout_s=60, key=None, read_bytes_max=1 << 22)
    nonce = new_nonce()
    try:
        asked = encode(Prefill(pack(PROMPT)), nonce)
        both = [decode_answer(client.ask(asked)) for _ in range(2)]
        assert both[0] == both[1] and len(p.prompts) == 1
        client.ask(encode(Cancel(nonce)))
        until(lambda: len(p.aborted) == 1, within_s=60, what="it is called off")
    finally:
        client.close()
