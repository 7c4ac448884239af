"""Engines of several ranks lend and bring, rank to rank over real ports and movers: each its heads,
all of them or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from ownerserve.engines.vllm.stated_ranks import stated_ranks
from ownerserve.node.transfers.roads import SHM, TCP
from ownerserve.node.vocabulary.events import PeerRecord
from ownerserve.store.format.model import ReadHit, ReadMiss, ReadOutcome
from ownerserve.transfer.layout.shards import Misfit
from tests.support.node.lending_nodes import AGENT, PROMPT, SECTIONS, Node, cells, wanted
from tests.support.node.lending_nodes import HEADS as LENT_HEADS
from tests.support.node.storing_node import StoringNode, put_away
from tests.support.vllm_parts.ranked import RECORDS, RankedEngine, state_of
from tests.support.waits import WAIT_S, until

pytestmark = pytest.mark.engine

Opened = Callable[..., RankedEngine]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens engines: a name, how many ranks, and what else is special."""
    engines: list[RankedEngine] = []

    def open_engine(name: str, ranks: int, **special: object) -> RankedEngine:
        engines.append(RankedEngine(name, ranks, tmp_path, **special))  # type: ignore[arg-type]
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("road", [SHM.name, TCP.name])
@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_each_rank_brings_its_heads_of_what_the_ranks_of_another_engine_have(
    opened: Opened, theirs: int, ours: int, road: str
) -> None:
    near, far = opened("near", theirs), opened("far", ours, roads=(road,))
    near.keep()
    load = far.offered(near)
    assert load is not None
    assert far.loads_at_last(load), [worker.bringing.peers.brings for worker in far.workers]
    for worker in far.workers:
        peers = worker.bringing.peers
        assert worker.pages.written == [worker.own_state(one) for one in RECORDS]
        size = sum(map(len, worker.pages.written)) * peers.brings["brought"]
        assert peers.brought_bytes == {road: size}, "no byte more than it has"


@pytest.mark.parametrize("tier", ["device", "host memory"])
def test_ranks_bring_their_heads_of_what_a_worker_with_all_of_them_has(
    opened: Opened, tier: str
) -> None:
    """As an hf worker lends it, from its device and from below."""
    far, near = opened("far", 2, heads=LENT_HEADS), StoringNode(None)
    try:
        if tier == "device":
            near.turn(AGENT, PROMPT)
            whole = {one: near.bytes_of(one) for one in RECORDS}
        else:
            whole = put_away(near)
        load = far.offered(near)
        assert load is not None
        assert far.loads_at_last(load)
        for worker in far.workers:
            heads = worker.holders["dense"].own_heads
            assert worker.pages.written == [
                heads_of_record(one, whole[one], heads) for one in RECORDS
            ]
    finally:
        near.close()


def heads_of_record(record: PeerRecord, whole: bytes, heads: range) -> bytes:
    """Those heads of a record that has all."""
    arrays = np.frombuffer(whole, np.float32).reshape(
        -1, *SECTIONS[record.component].parts[0].shape
    )
    return arrays[..., heads.start : heads.stop, :].tobytes()


@pytest.fixture
def decoder() -> Iterator[Node]:
    """A worker of one rank that has all heads, as an hf worker that answers turns."""
    node = Node("d", roads=(TCP.name,))
    yield node
    node.close()


def read_by(decoder: Node, near: RankedEngine) -> ReadOutcome:
    """What a restore of the prompt reads of it."""
    prefix = wanted(near.address)
    held = decoder.transfers.peers.look(prefix)
    return decoder.reads(cells(prefix, frozenset(held))).result(WAIT_S)


def brings_nothing(decoder: Node) -> bool:
    state = decoder.transfers.service.target.state
    return not any(state.counts(time.monotonic()).values())


def test_a_worker_with_all_heads_brings_what_two_ranks_have_computed(
    opened: Opened, decoder: Node
) -> None:
    near = opened("near", 2, heads=LENT_HEADS)
    near.keep()
    came = read_by(decoder, near)
    assert isinstance(came, ReadHit), decoder.transfers.peers.brings
    told = wanted(near.address).records
    for part in came.parts:
        record = told[part.meta.id]
        assert bytes(part.data) == state_of(record, range(LENT_HEADS)), record
    assert {told[part.meta.id] for part in came.parts} == {*RECORDS}
    until(lambda: brings_nothing(decoder), within_s=60, what="nothing is read")
    until(lambda: not any(one.used_bytes for one in near.workers), within_s=60, what="nor lent")


@pytest.mark.parametrize("fate", ["dead", "dies amid it", "silent"])
def test_one_of_two_ranks_that_computed_a_prompt_is_enough_that_none_of_it_counts(
    opened: Opened, decoder: Node, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = opened("near", 2, heads=LENT_HEADS)
    near.keep()
    stays, lost = near.workers
    assert lost.lending is not None
    prefix, peers = wanted(near.address), decoder.transfers.peers
    wants = cells(prefix, frozenset(peers.look(prefix)))
    goes_on, found = Event(), lost.tiers.find
    if fate != "dead":
        monkeypatch.setattr(lost.tiers, "find", lambda ids: goes_on.wait() and found(ids))
    else:
        lost.close()
    try:
        reading = decoder.reads(wants)
        if fate == "dies amid it":
            source = lost.lending.transfers.service.source.state
            until(lambda: source.counts()["opening"], within_s=60, what="a lend is asked for")
            goes_on.set()
            lost.close()
        came = reading.result(WAIT_S)
    finally:
        goes_on.set()
    assert isinstance(came, ReadMiss), "it computes"
    assert not peers.brings["brought"] and sum(peers.brings.values()) == 1, peers.brings
    until(lambda: brings_nothing(decoder), within_s=60, what="nothing is read")
    until(lambda: not stays.used_bytes, within_s=60, what="its room is back")


def test_what_one_rank_lacks_is_not_told(opened: Opened) -> None:
    near, far = opened("near", 2), opened("far", 2)
    near.keep()
    near.workers[1].tiers.remove([*wanted(near.address).records])
    assert far.offered(near) is None
    assert far.transfers.peers.looks == {"nothing": 1}


def test_ranks_of_another_model_are_refused_before_a_byte_moves(opened: Opened) -> None:
    near, far = opened("near", 2, spec=b"other"), opened("far", 2)
    near.keep()
    assert far.offered(near) is None
    assert far.transfers.peers.looks == {Misfit.OTHER_SPEC: 1}


def test_a_rank_that_does_not_fit_the_others_reads_nothing(opened: Opened) -> None:
    """The offers came by way of the scheduler's process, which may know it otherwise."""
    near, far = opened("near", 2), opened("far", 2)
    near.keep()
    load = far.offered(near)
    assert load is not None
    other = opened("other", 4).workers[3]
    far.workers[1].bringing.peers.own = ({"dense": other.holders["dense"]},)
    assert far.load(load) == "absent"
    assert not far.workers[1].pages.written
    assert far.workers[1].bringing.peers.looks == {Misfit.OTHER_SECTION: 1}


@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (2, 1), (2, 4)])
def test_one_rank_of_the_lender_that_is_gone_is_enough_that_nothing_counts(
    opened: Opened, theirs: int, ours: int
) -> None:
    near, far = opened("near", theirs), opened("far", ours)
    near.keep()
    load = far.offered(near)
    assert load is not None
    near.workers[-1].close()
    assert far.load(load) == "absent"
    assert not far.workers[-1].pages.written
    stays = near.workers[0]
    until(lambda: not stays.used_bytes, within_s=60, what="its room is back")
    assert far.offered(near) is None, "who does not state itself is not told of"


def test_a_rank_that_stops_leaves_no_word(opened: Opened, tmp_path: Path) -> None:
    near = opened("near", 2)
    shards = [tmp_path / "near" / f"shard-{rank}-of-2" for rank in range(2)]
    assert [one.lender.unit for one in stated_ranks(shards)] == [
        worker.lending.stated.lender.unit for worker in near.workers if worker.lending
    ]
    near.workers[1].close()
    assert stated_ranks(shards) == ()
    (shards[1] / "rank.lends").write_bytes(b"\xc1")
    assert stated_ranks(shards) == (), "what can't be read states nothing"


def test_a_load_that_waits_for_a_silent_rank_is_given_up_and_all_is_quiet(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has its part and the other waits; then nobody waits for the turn any more."""
    near, far = opened("near", 2), opened("far", 2)
    near.keep()
    load = far.offered(near)
    silent, goes_on = near.workers[1], Event()
    assert load is not None and silent.lending is not None
    found, asked = silent.tiers.find, silent.lending.transfers.service.source.state
    monkeypatch.setattr(silent.tiers, "find", lambda ids: goes_on.wait() and found(ids))
    try:
        far.begin(load)
        until(lambda: asked.counts()["opening"], within_s=60, what="a lend is asked for")
        until(lambda: far.workers[0].pages.written, within_s=60, what="the other has its part")
        far.give_up(load)
        assert far.ended() == "cancelled"
        assert not far.workers[1].pages.written
    finally:
        goes_on.set()
    until(
        lambda: not any(worker.used_bytes for worker in near.workers),
        within_s=60,
        what="nothing is lent",
    )
